"""A request's own template is rendered in a process that can be killed, and what it does there is nobody else's."""

from __future__ import annotations

import os
import signal

import pytest

from minivllm.engine import template_child
from minivllm.engine.conversation import rendered
from minivllm.errors import BadRequest, ModelError
from minivllm.sandbox import Limits, Sandbox

CHAT = [{"role": "user", "content": "hü"}]


def test_it_renders_what_it_would_here():
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ x }}{% endfor %}{{ tools | length }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    given = (template, CHAT, tools, {"x": 1})
    assert template_child.render(*given) == rendered(*given) == "user:hü11"
    with pytest.raises(BadRequest, match="no: user"):
        template_child.render("{{ raise_exception('no: ' ~ messages[0].role) }}", CHAT, None, {})
    with pytest.raises(ModelError, match="line 2"):
        template_child.render("\n{% if %}", CHAT, None, {})


def test_a_child_that_is_killed_is_a_bad_request_and_replaced(monkeypatch):
    sandbox = Sandbox("minivllm.engine.template_child", b"", Limits(seconds=60, megabytes=2048))
    monkeypatch.setattr(template_child, "_sandbox", lambda: sandbox)
    try:
        assert template_child.render("{{ messages[0].content }}", CHAT, None, {}) == "hü"
        os.kill(sandbox.pid, signal.SIGKILL)
        sandbox._child.process.wait()
        assert template_child.render("{{ messages[0].content }}", CHAT, None, {}) == "hü"
    finally:
        sandbox.close()


def test_what_takes_longer_than_its_limit_is_stopped(monkeypatch):
    sandbox = Sandbox("minivllm.engine.template_child", b"", Limits(seconds=0, megabytes=2048))
    monkeypatch.setattr(template_child, "_sandbox", lambda: sandbox)
    try:
        with pytest.raises(BadRequest, match="it takes over 0 s"):
            template_child.render("{% for i in range(99999) %}{{ i }}{% endfor %}", CHAT, None, {})
        assert sandbox.pid is None
    finally:
        sandbox.close()
