"""A chat with an OpenAI-compatible endpoint: a text field and a growing transcript where somebody looks, a plain loop elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from trtllm_workshop.widgets import is_live


def stream_reply(client: Any, model: str, messages: Sequence[dict[str, str]], max_tokens: int) -> Iterator[str]:
    """The pieces of the next answer, as they arrive. `client` is an `openai.OpenAI`; `messages` the conversation so far."""
    with client.chat.completions.create(
        model=model, messages=list(messages), max_tokens=max_tokens, temperature=0, stream=True
    ) as stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


def chat_box(
    url: str, *, model: str, questions: Sequence[str], max_tokens: int = 64, api_key: str = "not needed"
) -> list[str]:
    """Chat with the server at `url`. The questions are asked once, whoever looks; in a live notebook a field for more follows.

    The whole conversation is sent with every question, since the server keeps none of it.

    Args:
        url: of the server, without `/v1`.
        model: the name that `/v1/models` gives.
        questions: asked in this order.
        max_tokens: of each answer.

    Returns:
        The answers to `questions`; those to further questions are added as they come.

    Raises:
        openai.OpenAIError: when the server does not answer, or refuses.
    """
    from openai import OpenAI

    client = OpenAI(base_url=url.rstrip("/") + "/v1", api_key=api_key, timeout=120, max_retries=0)
    messages: list[dict[str, str]] = []
    answers: list[str] = []

    def ask(question: str, show: Any) -> None:
        asked = [*messages, {"role": "user", "content": question}]
        answer = ""
        for piece in stream_reply(client, model, asked, max_tokens):
            answer += piece
            show(piece)
        messages[:] = [*asked, {"role": "assistant", "content": answer}]
        answers.append(answer)

    for question in questions:
        print(f"You: {question}\nModel: ", end="")
        ask(question, lambda piece: print(piece, end="", flush=True))
        print()
    if is_live():
        _field(ask)
    return answers


def _field(ask: Any) -> None:
    import ipywidgets
    from IPython.display import display

    field = ipywidgets.Text(placeholder="Ask something", layout=ipywidgets.Layout(width="70%"))
    button = ipywidgets.Button(description="Send", button_style="primary")
    view = ipywidgets.HTML()
    shown: list[str] = []

    def send(_: Any) -> None:
        question = field.value.strip()
        if not question or button.disabled:
            return
        button.disabled, field.value, answer = True, "", ""
        shown.append(f"<p><b>You:</b> {escape(question)}</p>")

        def show(piece: str) -> None:
            nonlocal answer
            answer += piece
            view.value = "".join(shown) + f"<p><b>Model:</b> {escape(answer)}</p>"

        show("")
        try:
            ask(question, show)
        except Exception as problem:  # shown where the person looks; the conversation goes on without this question
            show(f" [{type(problem).__name__}: {problem}]")
        shown.append(f"<p><b>Model:</b> {escape(answer)}</p>")
        button.disabled = False

    button.on_click(send)
    field.on_submit(send) if hasattr(field, "on_submit") else None
    display(ipywidgets.VBox([view, ipywidgets.HBox([field, button])]))
