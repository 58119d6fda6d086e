"""WikiText's words put back together, and chunks that are spread over a text."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from turboquant_mlx.errors import OptionError
from turboquant_mlx.evaluate import text as module
from turboquant_mlx.evaluate.text import join_words, make_chunks, read_text

SLICE = Path(__file__).parents[1] / "fixtures" / "wikitext" / "slice.txt"


@pytest.mark.parametrize(
    ("apart", "together"),
    [
        ("1 @,@ 500 well @-@ known , 3 @.@ 5 %", "1,500 well-known, 3.5%"),
        ("It ( the film ) came ; then it went .", "It (the film) came; then it went."),
        ('He said " no " and " yes " twice !', 'He said "no" and "yes" twice!'),
        ("It 's what they 're told , isn 't it ?", "It's what they're told, isn 't it?"),
        ("he does n't pay $ 5 for the dogs ' food", "he doesn't pay $5 for the dogs' food"),
        ("  = = Title = =  \n plain \n", "= = Title = =\nplain\n"),
        ("a - b : c", "a - b: c"),
    ],
)
def test_words_are_put_back_together(apart, together):
    assert join_words(apart) == together


def test_only_a_text_in_wikitexts_form_is_changed(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Plain prose , oddly spaced .")
    assert read_text(file) == module.SourceText("text.txt", "Plain prose , oddly spaced .", False)
    file.write_text("A well @-@ known one .")
    assert read_text(file) == module.SourceText("text.txt", "A well-known one.", True)
    assert read_text(file, raw=True).content == "A well @-@ known one ."


def test_the_slice_in_the_repository_is_wikitext_with_its_notice():
    text = read_text(SLICE)
    assert text.joined and len(text.content) > 10_000
    notice = (SLICE.parent / "README.md").read_text(encoding="utf-8")
    assert "Attribution-ShareAlike" in notice and "Merity" in notice


def test_texts_that_cannot_be_scored_on(tmp_path):
    with pytest.raises(OptionError, match=r"cannot read the text .*absent.txt: No such file"):
        read_text(tmp_path / "absent.txt")
    with pytest.raises(OptionError, match="cannot read the text"):
        read_text(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="pipe is a pipe or a device"):
        read_text(tmp_path / "pipe")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(OptionError, match="empty is empty"):
        read_text(tmp_path / "empty")
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(OptionError, match="is not UTF-8"):
        read_text(tmp_path / "latin")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfwith a byte order mark")
    assert read_text(tmp_path / "marked").content == "with a byte order mark"


# --- chunks -------------------------------------------------------------------------------------


class Letters:
    """One token per letter, after a begin token where there is one."""

    def __init__(self, begin: int | None = None):
        self.bos_token_id = begin

    def encode(self, text: str, add_special_tokens: bool = True, **_) -> list[int]:
        lead = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return lead + [ord(letter) for letter in text]


ALPHABET = "".join(map(chr, range(100, 200)))


def test_chunks_are_spread_from_the_first_token_to_the_last():
    chunks = make_chunks(Letters(), ALPHABET, 4, 10)
    assert chunks.ids[:, 0].tolist() == [100, 130, 160, 190]
    assert (np.diff(chunks.ids, axis=1) == 1).all()
    assert (len(chunks), chunks.length, chunks.scored, chunks.available) == (4, 10, 9, 10)
    assert chunks.targets(1).tolist() == list(range(131, 140))


def test_chunks_do_not_overlap():
    chunks = make_chunks(Letters(), ALPHABET, 512, 30)
    assert len(chunks) == chunks.available == 3
    assert chunks.ids[:, 0].tolist() == [100, 135, 170]


def test_a_begin_token_leads_every_chunk_and_its_prediction_is_not_scored():
    chunks = make_chunks(Letters(begin=7), ALPHABET, 2, 10)
    assert chunks.ids[:, :2].tolist() == [[7, 100], [7, 191]]
    assert (chunks.length, chunks.skip, chunks.scored) == (10, 1, 8)
    assert chunks.targets(0).tolist() == list(range(101, 109))


def test_one_chunk_is_the_beginning():
    assert make_chunks(Letters(), ALPHABET, 1, 10).ids[0, 0] == 100


def test_a_text_shorter_than_a_chunk():
    with pytest.raises(OptionError, match="100 tokens, fewer than one chunk of 101") as caught:
        make_chunks(Letters(), ALPHABET, 1, 101)
    assert "--seq-len 100" in caught.value.hint
    with pytest.raises(OptionError) as caught:
        make_chunks(Letters(), "ab", 1, 10)
    assert "--seq-len" not in caught.value.hint


# --- the hub, played by a local server ----------------------------------------------------------


def archive(member: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as content:
        content.writestr(member, " = Title = \n A well @-@ known one . \n")
    return data.getvalue()


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for the one file that is wanted."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = f"/datasets/{module.HUB_REPO}/resolve/main/{module.HUB_FILE}"
        body = self.server.body if self.path == path else None
        self.send_response(404 if body is None else 200)
        if body is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("ETag", '"0123456789abcdef0123456789abcdef01234567"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body or b"")


PROGRAM = """
from turboquant_mlx.evaluate.text import read_text
from turboquant_mlx.errors import OptionError
try:
    text = read_text(None)
    print(text.name, text.joined, repr(text.content))
except OptionError as error:
    print(error.message)
    print(error.hint)
"""


def ask(endpoint: str, home: Path, **more: str) -> list[str]:
    """What reading without a file gives, in a process that knows this hub only."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}
    env["PYTHONPATH"] = str(Path(module.__file__).parents[2])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.body = archive(module.HUB_MEMBER)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_text_comes_from_the_hub_and_then_from_its_cache(hub, tmp_path):
    expected = ["WikiText-2 test True '= Title =\\nA well-known one.\\n'"]
    assert ask(f"http://127.0.0.1:{hub.server_port}", tmp_path) == expected
    assert ask("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1") == expected


@pytest.mark.parametrize(
    ("body", "offline", "reason"),
    [
        (archive(module.HUB_MEMBER), "1", "LocalEntryNotFoundError: "),
        (None, "0", "EntryNotFoundError: 404 "),
        (archive("something-else"), "0", "KeyError: "),
        (b"no archive", "0", "BadZipFile: "),
    ],
)
def test_without_the_hub_the_error_says_what_to_do(hub, tmp_path, body, offline, reason):
    hub.body = body
    address = f"http://127.0.0.1:{hub.server_port}"
    message, hint = ask(address, tmp_path, HF_HUB_OFFLINE=offline)
    assert message.startswith("the text of WikiText-2 test cannot be had from the hub (")
    assert reason in message
    assert "--text FILE" in hint
