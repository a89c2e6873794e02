"""What the network is asked: each page once, and only a server that says so makes one gone."""

from __future__ import annotations

import http.server
import threading

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.commands import _cli, _maintenance
from torchparts_conformance.requirements._registry import load_registry
from torchparts_conformance.requirements._traceability import source_tests
from torchparts_conformance.verify import _online


def test_what_does_not_exist_is_named():
    """A page that is gone, and a source test that its file does not define, are problems."""
    sources, requirements = source_tests(), list(load_registry().values())
    good = "".join(f"def {source.name.partition('::')[2]}(self):\n" for source in sources)
    asked = []

    def fetch(address):
        asked.append(address)
        return None if address.endswith("/96136") else good.replace("def test_fqn(", "def x(")

    problems = list(_online.problems(sources, requirements, fetch=fetch))
    lost, *gone = problems
    assert lost.startswith("test_checkpoint_wrapper.py::CheckpointWrapperTest::test_fqn is not in ")
    assert gone
    assert all(text.endswith("pytorch/issues/96136, which does not exist") for text in gone)
    assert len(asked) == len(set(asked))


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({"/here": 200, "/gone": 404, "/removed": 410}.get(self.path, 503))
        self.end_headers()
        self.wfile.write(b"text")

    def log_message(self, *_):
        """Say nothing."""


def test_page_is_there_gone_or_unknown():
    """Only a server that says so makes a page one that does not exist."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        root = f"http://127.0.0.1:{server.server_port}"
        try:
            assert _online.get(f"{root}/here") == "text"
            assert _online.get(f"{root}/gone") is None
            assert _online.get(f"{root}/removed") is None
            with pytest.raises(ReportError, match="gave status 503, but a page is needed"):
                _online.get(f"{root}/busy")
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(ReportError, match="refused, but a page is needed"):
        _online.get(f"{root}/here")


def test_network_is_asked_only_on_request(monkeypatch, capsys):
    """`trace` is a local command; with `--online`, what is missing is a broken suite."""
    monkeypatch.setattr(_maintenance._online, "problems", lambda *_: ["CW-001 names nothing"])
    assert _cli.main(["trace"]) == 0
    assert _cli.main(["trace", "--online"]) == 5
    assert capsys.readouterr().err == "CW-001 names nothing\n"
