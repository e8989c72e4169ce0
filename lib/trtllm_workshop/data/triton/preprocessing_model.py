"""Triton model: text to token ids, and everything else of a request that the engine needs in tokens."""

import json
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

# The interpreter inside Triton's stub does not read PYTHONPATH.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
os.environ.setdefault("USE_TORCH", "0")  # a tokenizer needs no PyTorch, which takes seconds and memory to load


def values(request, name):
    """The values of an input of shape [1, n], [] when the request does not have it. Raises ValueError for several rows."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return []
    array = tensor.as_numpy()
    if array.shape[0] != 1:
        raise ValueError(
            f"{name} has {array.shape[0]} rows: send each prompt as a request of its own, the engine batches"
        )
    return [value.decode("utf-8") if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]


def word_lists(sequences):
    """Token sequences in the engine's form, int32 [1, 2, n]: all tokens one after another, and where each sequence ends."""
    tokens = [token for sequence in sequences for token in sequence]
    ends = np.cumsum([len(sequence) for sequence in sequences]).tolist()
    width = max(1, len(tokens))
    return np.array([[tokens + [0] * (width - len(tokens)), ends + [-1] * (width - len(ends))]], dtype=np.int32)


class TritonPythonModel:
    """A tokenizer."""

    def initialize(self, args):
        """Load the tokenizer of `tokenizer_dir`."""
        from transformers import AutoTokenizer

        parameters = json.loads(args["model_config"])["parameters"]
        self._tokenizer = AutoTokenizer.from_pretrained(parameters["tokenizer_dir"]["string_value"])
        self._special = parameters["add_special_tokens"]["string_value"] == "true"

    def execute(self, requests):
        """One response for each request; what is wrong with a request becomes its error."""
        return [self._response(request) for request in requests]

    def _response(self, request):
        try:
            tensors = self._tensors(request)
        except (ValueError, UnicodeDecodeError) as problem:
            error = pb_utils.TritonError(str(problem), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=error)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])

    def _tensors(self, request):
        query = values(request, "QUERY")
        if not query or not query[0]:
            raise ValueError("the prompt is an empty text; give at least one character")
        ids = self._tokenizer.encode(query[0], add_special_tokens=self._special)
        end = values(request, "END_ID") or [self._tokenizer.eos_token_id]
        pad = values(request, "PAD_ID") or [self._tokenizer.pad_token_id]
        end = -1 if end[0] is None else end[0]
        return {
            "INPUT_ID": np.array([ids], dtype=np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(ids)]], dtype=np.int32),
            "REQUEST_OUTPUT_LEN": np.array([values(request, "REQUEST_OUTPUT_LEN")], dtype=np.int32),
            "STOP_WORDS_IDS": word_lists(self._words(request, "STOP_WORDS_DICT")),
            "BAD_WORDS_IDS": word_lists(self._words(request, "BAD_WORDS_DICT")),
            "OUT_END_ID": np.array([[end]], dtype=np.int32),
            "OUT_PAD_ID": np.array([[end if pad[0] is None else pad[0]]], dtype=np.int32),
        }

    def _words(self, request, name):
        """Token ids of each word; empty ones, which clients send to say "none", are left out."""
        return [self._tokenizer.encode(word, add_special_tokens=False) for word in values(request, name) if word]
