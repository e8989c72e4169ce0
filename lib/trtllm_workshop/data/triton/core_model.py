"""Triton model: token ids in, token ids out, by TensorRT-LLM's Python (LLM.generate_async), with the tensors of the C++ backend.

It stands in for the C++ backend where that is not there, so that the chain around it can be run and tested.
"""

import asyncio
import json
import os
import sys
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

CANCEL_CHECK_S = 0.05
FINISH_S = 25.0

# The interpreter inside Triton's stub does not read PYTHONPATH, which says where tensorrt_llm lies.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]

SAMPLING = {
    "request_output_len": "max_tokens", "min_tokens": "min_tokens", "temperature": "temperature", "runtime_top_k": "top_k",
    "runtime_top_p": "top_p", "seed": "seed", "repetition_penalty": "repetition_penalty", "pad_id": "pad_id",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip


def array(request, name):
    """An input without its first dimension of 1, None when the request does not have it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    found = tensor.as_numpy()
    if found.ndim and found.shape[0] != 1:
        raise ValueError(
            f"{name} has {found.shape[0]} rows: send each prompt as a request of its own, the engine batches"
        )
    return found[0] if found.ndim else found


def scalar(request, name):
    found = array(request, name)
    return None if found is None else np.asarray(found).reshape(-1)[0].item()


def sequences(words):
    """The token sequences of int32 [2, n]: tokens one after another, and where each sequence ends (-1: no more)."""
    if words is None:
        return []
    tokens, ends = words.tolist()
    ends = [end for end in ends if end > 0]
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class TritonPythonModel:
    """One engine, one thread with an event loop in which every request is a task."""

    def initialize(self, args):
        """Load the engine."""
        from tensorrt_llm._tensorrt_engine import LLM
        from tensorrt_llm.llmapi import KvCacheConfig, SamplingParams

        values = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        cache = KvCacheConfig(
            free_gpu_memory_fraction=float(values["kv_cache_free_gpu_mem_fraction"]),
            max_tokens=int(values["max_tokens_in_paged_kv_cache"]),
        )
        self._params, self._exclude = SamplingParams, values["exclude_input_in_output"] == "true"
        self._llm = LLM(model=values["gpt_model_path"], tokenizer=values["tokenizer_dir"], kv_cache_config=cache)
        self._running = {}  # task -> (request id, output), None before there is one
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()

    def execute(self, requests):
        """Start a task for each request. Answers go through the response senders, so nothing is returned."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request, request.get_response_sender()), self._loop)

    def finalize(self):
        """Finish what was accepted, then free the engine."""
        end = time.monotonic() + FINISH_S
        while self._running and time.monotonic() < end:
            time.sleep(0.02)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._llm.shutdown()

    async def _serve(self, request, sender):
        task = asyncio.current_task()
        self._running[task] = None
        try:
            if scalar(request, "stop"):
                self._stop(request.request_id())
                self._send(sender, [], final=True)
                return
            await self._answer(request, sender)
        except Exception as problem:
            wrong = isinstance(problem, ValueError)
            kind = pb_utils.TritonError.INVALID_ARG if wrong else pb_utils.TritonError.INTERNAL
            error = pb_utils.TritonError(str(problem) if wrong else f"{type(problem).__name__}: {problem}", kind)
            # With the mark of the last response: an ensemble around this model would wait for ever for a mark that comes alone.
            response = pb_utils.InferenceResponse(output_tensors=[], error=error)
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        finally:
            self._running.pop(task, None)

    async def _answer(self, request, sender):
        ids = array(request, "input_ids")[: scalar(request, "input_lengths")].tolist()
        exclude, stream = scalar(request, "exclude_input_in_output"), bool(scalar(request, "streaming"))
        pending = [] if (self._exclude if exclude is None else exclude) else ids
        output = self._llm.generate_async(ids, self._sampling(request), streaming=True)
        self._running[asyncio.current_task()] = request.request_id(), output
        sent, checked = 0, time.monotonic()
        async for _ in output:
            new, sent = output.outputs[0].token_ids[sent:], len(output.outputs[0].token_ids)
            pending = pending + new
            if stream and pending and not output.finished:
                self._send(sender, pending)
                pending = []
            if time.monotonic() - checked > CANCEL_CHECK_S:
                checked = time.monotonic()
                if sender.is_cancelled():
                    output.abort()
        self._send(sender, pending, final=True)

    def _stop(self, request_id):
        """Cancel the running requests with this id; it is no error when none runs, as with the C++ backend."""
        for found in list(self._running.values()):
            if found is not None and request_id and found[0] == request_id:
                found[1].abort()

    def _sampling(self, request):
        values = {name: scalar(request, theirs) for theirs, name in SAMPLING.items()}
        end = scalar(request, "end_id")
        values |= {"ignore_eos": True} if end == -1 else {"end_id": end}
        for name, theirs in (("stop", "stop_words_list"), ("bad", "bad_words_list")):
            words = [self._llm.tokenizer.decode(one) for one in sequences(array(request, theirs))]
            values[name] = words or None
        return self._params(detokenize=bool(values["stop"]), **{k: v for k, v in values.items() if v is not None})

    def _send(self, sender, tokens, final=False):
        tensors = [
            pb_utils.Tensor("output_ids", np.array([[tokens]], dtype=np.int32)),
            pb_utils.Tensor("sequence_length", np.array([[len(tokens)]], dtype=np.int32)),
        ]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        sender.send(pb_utils.InferenceResponse(tensors), flags=flags)
