"""The template's process: upstream's text, limits on time, memory and output, and that it works again afterwards."""

from __future__ import annotations

import threading
import time
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from llm_svc import chat_template
from llm_svc.chat_template import ChatTemplate, TemplateError, TemplateRefused, TemplateTooSlow
from llm_svc.prompt import PromptBuilder
from llm_svc.prompt_parts import ChatMessage, TextPart
from svc_common.errors import ResourceExhausted

MESSAGES = [{"role": "user", "content": " hi <b> "}, {"role": "assistant", "content": "žluť 👩‍👧"}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3
ENDLESS = {
    "nested ranges": NESTED,
    "recursive loop": "{% for x in range(99999) recursive %}{{ loop(range(99999)) if loop.depth0 < 9 }}{% endfor %}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "one large power": "{{ ((messages | length + 7) ** 99999) ** 9999 }}",
    "one large power, folded while compiling": "{{ (9 ** 99999) ** 9999 }}",
    "loop in a filter": "{{ range(99999) | map('string') | list | groupby('x') | list }}" * 200 + NESTED,
}
TOO_LARGE = {
    "multiplied text": "{{ 'a' * 10 ** 11 }}",
    "padded text": "{{ 'a' | center(10 ** 11) }}",
    "doubling": "{% set n = namespace(s='aaaaaaaa') %}{% for _ in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
}


def letter_tokenizer() -> Any:
    core = Tokenizer(models.WordLevel({"a": 0, "loop": 1}))
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content | trim }}]\n  {% endif %}\n{% endfor %}\n",
        "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ bos_token }} {{ unknown }}{{ tools is none }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
        "a {%- generation -%} {{ messages[1].content }} {%- endgeneration %} b{{ '!' if add_generation_prompt }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ dict(a=1) }} {{ strftime_now('%Y') }} {{ '%02d' % 7 }} {{ '{:>4}'.format('x') }}",
        "{{ messages[0].content[::-1] }}",
    ],
)
def test_text_equals_upstreams(source: str) -> None:
    template = ChatTemplate(source, limit_seconds=5, variables={"bos_token": "<s>"})
    upstream: Any = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>")
    assert template.render(MESSAGES) == upstream[0][0]


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_an_endless_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock does not help: processor time alone ends it.
    monkeypatch.setattr(chat_template, "CLOCK_FACTOR", 1000)
    template = ChatTemplate(source, limit_seconds=0.2)
    started = time.thread_time()
    with pytest.raises(TemplateTooSlow, match=r"0\.2 seconds"):
        template.render(MESSAGES)
    assert time.thread_time() - started < 0.2, "our own thread only waits"
    assert template.process_id is None


def test_the_clock_stops_what_takes_no_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(NESTED, limit_seconds=60)
    monkeypatch.setattr(chat_template, "CLOCK_FACTOR", 0.001)
    with pytest.raises(TemplateTooSlow):
        template.render(MESSAGES)
    assert template.process_id is None


@pytest.mark.parametrize("source", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_a_template_that_takes_too_much_memory_is_stopped(source: str) -> None:
    template = ChatTemplate(source, limit_seconds=5)
    with pytest.raises(TemplateError, match="memory"):
        template.render(MESSAGES)


def test_output_is_limited() -> None:
    template = ChatTemplate("{{ 'a' * 100000000 }}", limit_seconds=5)
    with pytest.raises(TemplateError, match="100000000 bytes, more than"):
        template.render(MESSAGES)


def test_an_endless_template_refuses_the_request_and_the_next_one_is_served() -> None:
    source = "{% if messages[0].content == 'loop' %}" + NESTED + "{% endif %}{{ messages[0].content }}"
    builder = PromptBuilder(letter_tokenizer(), chat_template=source, vocab_size=8, template_seconds=0.2)
    with pytest.raises(ResourceExhausted, match=r"chat.*0\.2 seconds"):
        builder.build_chat([ChatMessage("user", (TextPart("loop"),))])
    assert builder.build_chat([ChatMessage("user", (TextPart("a"),))])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].x.y }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError|unsafe"),
        ("{{ messages.append(1) }}", "SecurityError|unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include 'x' %}", "TypeError|loader"),
        ("{% if %}", "does not compile"),
    ],
)
def test_a_broken_template_says_how(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source, limit_seconds=5).render(MESSAGES)


def test_raise_exception_is_told_apart() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", limit_seconds=5)
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        template.render(MESSAGES)


def test_threads_share_one_process() -> None:
    template = ChatTemplate("{{ messages[0].content }}", limit_seconds=5)
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            answers[number] = template.render([{"role": "user", "content": str(number) * 10_000}])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: str(number) * 10_000 for number in range(4)}
    process_id = template.process_id
    assert process_id is not None and psutil.pid_exists(process_id)
    template.close()
    assert not psutil.pid_exists(process_id)


def test_a_killed_process_is_reported_and_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", limit_seconds=5)
    template.render(MESSAGES)
    psutil.Process(template.process_id).kill()
    with pytest.raises(TemplateError, match="ended with status -9"):
        template.render(MESSAGES)
    assert template.render(MESSAGES) == " hi <b> "


def test_the_process_ends_with_its_template() -> None:
    template = ChatTemplate("x", limit_seconds=5)
    template.render(MESSAGES)
    process_id = template.process_id
    assert process_id is not None and psutil.pid_exists(process_id)
    del template
    assert not psutil.pid_exists(process_id)
