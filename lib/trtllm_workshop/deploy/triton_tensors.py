"""The inputs and outputs that clients of every text model of the course see: names and types of TensorRT-LLM's backend."""

from __future__ import annotations

from trtllm_workshop.deploy.pbtxt import Tensor

TEXT_INPUTS = (
    Tensor("text_input", "STRING", note="the prompt"),
    Tensor("max_tokens", "INT32", note="longest answer in tokens"),
    Tensor("stream", "BOOL", optional=True, note="one response per piece of text"),
    Tensor("stop_words", "STRING", (-1,), True, "texts that end the answer"),
    Tensor("bad_words", "STRING", (-1,), True, "texts that must not appear"),
    Tensor("exclude_input_in_output", "BOOL", optional=True, note="false: the answer begins with the prompt"),
    Tensor("end_id", "INT32", optional=True, note="end token; -1: do not stop at it"),
    Tensor("pad_id", "INT32", optional=True),
    Tensor("temperature", "FP32", optional=True, note="changes nothing without top_k or top_p"),
    Tensor("top_k", "INT32", optional=True, note="1 is greedy, 0 no limit"),
    Tensor("top_p", "FP32", optional=True, note="a share of probability, up to 1"),
    Tensor("seed", "UINT64", optional=True, note="the same seed repeats a sampled answer"),
    Tensor("random_seed", "UINT64", optional=True, note="what older releases call seed"),
    Tensor("min_tokens", "INT32", optional=True),
    Tensor("repetition_penalty", "FP32", optional=True, note="1 changes nothing"),
    Tensor("presence_penalty", "FP32", optional=True, note="0 changes nothing"),
    Tensor("frequency_penalty", "FP32", optional=True, note="0 changes nothing"),
    Tensor("stop", "BOOL", optional=True, note="true: end the running request that has this request's id"),
)
# The chain around the C++ backend knows one name of the seed.
CHAIN_INPUTS = tuple(tensor for tensor in TEXT_INPUTS if tensor.name != "random_seed")
TEXT_OUTPUTS = (
    Tensor("text_output", "STRING", note="the answer; with stream the text since the response before"),
    Tensor("finish_reason", "STRING", note="stop, length or cancelled; empty while it runs"),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32", note="so far"),
)
