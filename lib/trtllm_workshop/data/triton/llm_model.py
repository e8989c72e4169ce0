"""Triton model: text in, text out, by TensorRT-LLM's Python (LLM.generate_async). Serves either toolchain.

Triton hands over requests one by one; the engine batches them in flight. The model is decoupled: a request has one response
with `stream` false and one per piece of text with `stream` true. A client that goes away ends its request's work, and a request
with `stop` true ends the running one with the same request id. Every response passes from this process to the server through
shared memory and costs time of its one event loop, which limits the pieces of text a second of all streams together.
"""

import asyncio
import difflib
import json
import os
import sys
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

CANCEL_CHECK_S = 0.05  # how often clients that went away are looked for
FINISH_S = 25.0  # what accepted requests get when the server ends; less than Triton's own 30 s

# The interpreter inside Triton's stub does not read PYTHONPATH, which says where tensorrt_llm lies.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]


def scalar(request, name):
    """The one value of an input, None when the request does not have it. Raises ValueError for several values."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    values = [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()
    if len(values) > 1:
        raise ValueError(f"{name} has {len(values)} values, expected one; send each prompt as a request of its own")
    value = values[0] if values else None
    return value.decode("utf-8") if isinstance(value, bytes) else value


def texts(request, name):
    """The strings of an input; empty strings, which clients send to say "none", are left out."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    values = [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()
    return [text for value in values if (text := value.decode("utf-8"))] or None


def seed_of(request):
    """`seed`, or `random_seed` as older releases call it."""
    new, old = scalar(request, "seed"), scalar(request, "random_seed")
    if None not in (new, old) and new != old:
        raise ValueError(f"seed={new} and random_seed={old} are two names of one value; send one of them")
    return old if new is None else new


def refuse_unknown(request, names):
    """Raises ValueError for a field that is no input: /generate makes it a parameter, and nobody would notice a misspelt one."""
    for name in json.loads(request.parameters() or "{}"):
        if not name.startswith("triton_"):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(names)}"
            raise ValueError(f"this model has no input {name!r}; {hint}")


def metric(name, words, kind, model):
    """A metric of Triton's /metrics page, `trtllm_python_NAME`, with its family, which must live as long."""
    family = pb_utils.MetricFamily(name=f"trtllm_python_{name}", description=words, kind=kind)
    return family, family.Metric(labels={"model": model})


class TritonPythonModel:
    """One engine, one thread with an event loop in which every request is a task."""

    def initialize(self, args):
        """Load the engine. Raises TritonModelException, which Triton shows as the reason why the model is not ready."""
        config = json.loads(args["model_config"])
        values = {name: entry["string_value"] for name, entry in config.get("parameters", {}).items()}
        if not pb_utils.using_decoupled_model_transaction_policy(config):
            raise pb_utils.TritonModelException(
                "this model needs model_transaction_policy { decoupled: true } in config.pbtxt"
            )
        for name in ("gpt_model_path", "tokenizer_dir"):
            if not os.path.isdir(values[name]):
                raise pb_utils.TritonModelException(
                    f"{name} is {values[name]}, which is no folder where the server runs"
                )
        from tensorrt_llm._tensorrt_engine import LLM
        from tensorrt_llm.llmapi import KvCacheConfig, SamplingParams

        cache = {"free_gpu_memory_fraction": float(values["kv_cache_free_gpu_mem_fraction"])}
        if values.get("max_tokens_in_paged_kv_cache"):
            cache["max_tokens"] = int(values["max_tokens_in_paged_kv_cache"])
        self._params = SamplingParams
        self._inputs = [entry["name"] for entry in config["input"]]
        self._exclude = values.get("exclude_input_in_output", "true") == "true"
        self._most = int(values.get("max_queue_size", 0))
        self._llm = LLM(
            model=values["gpt_model_path"], tokenizer=values["tokenizer_dir"], kv_cache_config=KvCacheConfig(**cache)
        )
        self._metrics = {
            name: metric(name, words, kind, args["model_name"])
            for name, words, kind in (
                ("requests", "Requests in work", pb_utils.MetricFamily.GAUGE),
                ("cancelled", "Requests that were cancelled", pb_utils.MetricFamily.COUNTER),
                ("output_tokens", "Tokens of answers", pb_utils.MetricFamily.COUNTER),
            )
        }
        self._running = {}  # task -> [request id, response sender, output]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()
        self._watcher = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def execute(self, requests):
        """Start a task for each request. Answers go through the response senders, so nothing is returned."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._serve(request, request.get_response_sender()), self._loop)

    def finalize(self):
        """Finish what was accepted, then free the engine."""
        end = time.monotonic() + FINISH_S
        while self._running and time.monotonic() < end:
            time.sleep(0.02)
        self._watcher.cancel()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._llm.shutdown()

    async def _serve(self, request, sender):
        """One request from its inputs to its last response; whatever goes wrong becomes an error response."""
        task = asyncio.current_task()
        try:
            refuse_unknown(request, self._inputs)
            if scalar(request, "stop"):
                self._stop(request.request_id())
                self._send(sender, final=True, text="", reason="cancelled", counts=(0, 0))
                return
            if self._most and len(self._running) >= self._most:
                busy = f"{self._most} requests are in work already (max_queue_size); try again later"
                self._fail(sender, busy, pb_utils.TritonError.UNAVAILABLE)
                return
            self._running[task] = entry = [request.request_id(), sender, None]
            self._metrics["requests"][1].set(len(self._running))
            await self._answer(request, sender, entry)
        except (ValueError, UnicodeDecodeError) as problem:
            self._fail(sender, str(problem), pb_utils.TritonError.INVALID_ARG)
        except Exception as problem:
            self._fail(sender, f"{type(problem).__name__}: {problem}", pb_utils.TritonError.INTERNAL)
        finally:
            self._running.pop(task, None)
            self._metrics["requests"][1].set(len(self._running))

    async def _answer(self, request, sender, entry):
        prompt, stream = scalar(request, "text_input"), bool(scalar(request, "stream"))
        exclude = scalar(request, "exclude_input_in_output")
        echo = "" if (self._exclude if exclude is None else exclude) else prompt
        output = entry[2] = self._llm.generate_async(prompt, self._sampling(request), streaming=stream)
        sent, inputs = 0, len(output.prompt_token_ids)
        if stream:
            async for _ in output:
                answer = output.outputs[0]
                if answer.finish_reason == "cancelled" or output.finished:
                    break
                # Some tokens complete no character; a text that ends in half of one waits for its other half.
                if len(answer.text) > sent and not answer.text.endswith("\N{REPLACEMENT CHARACTER}"):
                    piece, sent = echo + answer.text[sent:], len(answer.text)
                    self._send(sender, text=piece, counts=(inputs, len(answer.token_ids)))
                    echo = ""
        else:
            await output
        answer = output.outputs[0]
        self._metrics["output_tokens"][1].increment(len(answer.token_ids))
        if answer.finish_reason == "cancelled":
            self._metrics["cancelled"][1].increment(1)
            self._fail(sender, "the request was cancelled", pb_utils.TritonError.CANCELLED)
            return
        counts = inputs, len(answer.token_ids)
        self._send(sender, final=True, text=echo + answer.text[sent:], reason=answer.finish_reason, counts=counts)

    def _sampling(self, request):
        """SamplingParams of a request: only what it sent, so that TensorRT-LLM's own defaults hold for the rest."""
        names = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "end_id", "pad_id")
        names += ("repetition_penalty", "presence_penalty", "frequency_penalty")
        values = {name: scalar(request, name) for name in names}
        values |= {"stop": texts(request, "stop_words"), "bad": texts(request, "bad_words"), "seed": seed_of(request)}
        if values["end_id"] == -1:  # Triton's way to say: do not stop at the end token
            values |= {"end_id": None, "ignore_eos": True}
        return self._params(**{name: value for name, value in values.items() if value is not None})

    def _send(self, sender, text, counts, reason="", final=False):
        tensors = [
            pb_utils.Tensor("text_output", np.array([text.encode("utf-8")], dtype=object)),
            pb_utils.Tensor("finish_reason", np.array([reason.encode("utf-8")], dtype=object)),
            pb_utils.Tensor("num_input_tokens", np.array([counts[0]], dtype=np.int32)),
            pb_utils.Tensor("num_output_tokens", np.array([counts[1]], dtype=np.int32)),
        ]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)

    def _fail(self, sender, message, code):
        response = pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code))
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _stop(self, request_id):
        """Cancel the running requests with this id. Raises ValueError without an id or when none runs."""
        if not request_id:
            raise ValueError(
                "stop needs the id of the request that is to end (the field `id`, or request_id in a client)"
            )
        outputs = [output for name, _, output in self._running.values() if name == request_id and output is not None]
        if not outputs:
            raise ValueError(f"no request with the id {request_id!r} is running; it may have ended by itself")
        for output in outputs:
            output.abort()

    async def _watch(self):
        """Abort requests whose client went away."""
        while True:
            await asyncio.sleep(CANCEL_CHECK_S)
            for _, sender, output in list(self._running.values()):
                if output is not None and not output.finished and sender.is_cancelled():
                    output.abort()
