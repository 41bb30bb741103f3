"""One file per command. Each has `add(subparsers)` and `execute(arguments) -> exit code`."""
