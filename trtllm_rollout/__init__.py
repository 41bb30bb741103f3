"""Generation: the engine protocol and the engines that satisfy it. Token ids in, token ids out."""
