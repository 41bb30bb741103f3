"""The embedded engine: PyTorch, weights in TensorRT-LLM's rank-local layout, runs wherever torch runs."""
