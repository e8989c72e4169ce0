"""Triton model: preprocessing, engine and postprocessing in a loop (business logic scripting).

What the ensemble cannot do: it puts an answer's tokens together before they become text, so that a character made of several
tokens comes out whole in a stream.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

# Input of this model -> input of the engine's.
TO_ENGINE = {
    "temperature": "temperature", "top_k": "runtime_top_k", "top_p": "runtime_top_p", "seed": "seed",
    "min_tokens": "min_tokens", "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "exclude_input_in_output": "exclude_input_in_output",
    "stream": "streaming", "stop": "stop",
}  # fmt: skip
TO_PREPROCESSING = {
    "text_input": "QUERY", "max_tokens": "REQUEST_OUTPUT_LEN", "stop_words": "STOP_WORDS_DICT",
    "bad_words": "BAD_WORDS_DICT", "end_id": "END_ID", "pad_id": "PAD_ID",
}  # fmt: skip
FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids", "REQUEST_INPUT_LEN": "input_lengths", "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list", "BAD_WORDS_IDS": "bad_words_list", "OUT_END_ID": "end_id", "OUT_PAD_ID": "pad_id",
}  # fmt: skip


def renamed(tensors, names):
    """The tensors whose names are keys of `names`, under the names that they have there."""
    return [pb_utils.Tensor(names[t.name()], t.as_numpy()) for t in tensors if t.name() in names]


class Refused(Exception):
    """A model of the chain answered with an error, which is passed on."""


class TritonPythonModel:
    """The chain for one request at a time; as many copies run at once as config.pbtxt says."""

    def initialize(self, args):
        """Read the names of the chain."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._engine = parameters["tensorrt_llm_model_name"]["string_value"]
        self._accumulate = parameters["accumulate_tokens"]["string_value"] == "true"

    def execute(self, requests):
        """Run the chain; answers go through the response senders, so nothing is returned."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._run(request, sender)
            except Exception as problem:
                kind = (
                    pb_utils.TritonError.INVALID_ARG if isinstance(problem, Refused) else pb_utils.TritonError.INTERNAL
                )
                error = pb_utils.TritonError(str(problem), kind)
                sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _run(self, request, sender):
        inputs = request.inputs()
        ready = self._call("preprocessing", renamed(inputs, TO_PREPROCESSING), list(FROM_PREPROCESSING), request)
        engine = pb_utils.InferenceRequest(
            model_name=self._engine,
            request_id=request.request_id(),
            inputs=renamed(ready, FROM_PREPROCESSING) + renamed(inputs, TO_ENGINE),
            requested_output_names=["output_ids", "sequence_length"],
        )
        tokens, sent, held = [], "", False
        responses = engine.exec(decoupled=True)
        for response in responses:
            if response.has_error():
                raise Refused(response.error().message())
            arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            if not arrays:
                continue  # the end of the answer
            tokens += arrays["output_ids"][0, 0, : arrays["sequence_length"][0, 0]].tolist()
            text = self._text(tokens, request)
            # Half of a character waits for its other half.
            held = text.endswith("\N{REPLACEMENT CHARACTER}")
            if not held and text != sent:
                self._send(sender, text if self._accumulate else text[len(sent) :])
                sent = text
            if sender.is_cancelled():
                if hasattr(responses, "cancel"):  # not in older servers, where the engine goes on to the end
                    responses.cancel()
                return
        if held or not tokens:
            self._send(sender, text if tokens and self._accumulate else text[len(sent) :] if tokens else "")

    def _text(self, tokens, request):
        inputs = [
            pb_utils.Tensor("TOKENS_BATCH", np.array([[tokens]], dtype=np.int32)),
            pb_utils.Tensor("SEQUENCE_LENGTH", np.array([[len(tokens)]], dtype=np.int32)),
        ]
        (output,) = self._call("postprocessing", inputs, ["OUTPUT"], request)
        return output.as_numpy().reshape(-1)[0].decode("utf-8")

    def _call(self, model, inputs, outputs, request):
        asked = pb_utils.InferenceRequest(
            model_name=model, request_id=request.request_id(), inputs=inputs, requested_output_names=outputs
        )
        response = asked.exec()
        if response.has_error():
            raise Refused(response.error().message())
        return response.output_tensors()

    def _send(self, sender, text):
        output = pb_utils.Tensor("text_output", np.array([[text.encode("utf-8")]], dtype=object))
        sender.send(pb_utils.InferenceResponse([output]))
