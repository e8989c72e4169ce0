"""TensorRT-LLM workshop: the helper library behind the course notebooks."""
