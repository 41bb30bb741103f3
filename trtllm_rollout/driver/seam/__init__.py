"""The only place that imports or calls tensorrt_llm (a test holds it to that).

`build`: which version is there and what it can do. `llm`: the public AsyncLLM. `worker`: what is done to the engine inside a worker.
`executor`: the PyTorch-backend executor inside this process.
"""
