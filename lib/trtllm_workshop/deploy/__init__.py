"""Files for production, each checked: model repositories of Triton Inference Server."""
