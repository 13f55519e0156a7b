"""Whether XLA leaves bfloat16 convolutions to oneDNN: asked of the processor and of the compiler."""

import types

from fnet.hardware import _onednn


def test_where_it_is(monkeypatch):
    asked = _onednn.onednn.__wrapped__
    monkeypatch.setattr(_onednn, "read_cpu", lambda: types.SimpleNamespace(flags=("avx2",)))
    assert not asked()
    monkeypatch.setattr(_onednn, "read_cpu", lambda: types.SimpleNamespace(flags=("amx_bf16",)))
    monkeypatch.setattr(_onednn, "ONEDNN", {"xla_cpu_no_such_option": True})
    assert not asked()
    monkeypatch.setattr(_onednn, "ONEDNN", {})
    assert not asked()
