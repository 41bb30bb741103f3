"""TensorRT-LLM behind the engine protocol. `start.make_engine` builds one; every call to the library is in `seam`."""
