"""The connection between nodes: who may join it, what ends it, and what it does with what no runner sends."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.backends.nodes import channel as channels
from bench.backends.nodes import lead, member
from bench.backends.nodes.channel import Channel, LostError
from bench.driver.lead import Tee
from bench.errors import ConfigError
from bench.planning import compose

Pair = tuple[Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A channel, and the other end of its connection as it is."""
    ours, theirs = socket.socketpair()
    channel = channels.of_socket(ours)
    with theirs:
        yield channel, theirs
    channel.close()


def test_messages_come_whole_and_in_order_however_they_were_cut(pair: Pair) -> None:
    channel, other = pair
    text = b'{"kind": "a", "n": 1}\n{"kind": "beat"}\n{"kind": "b", "t": "\xc3\xb6"}\n'
    got = []
    for start in range(0, len(text), 7):
        other.sendall(text[start : start + 7])
        got += channel.received()
    assert got == [{"kind": "a", "n": 1}, {"kind": "b", "t": "ö"}]


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"no": "kind"}\n', b"\xff\n", b"x" * (2**21 + 1)])
def test_what_no_runner_sends_ends_the_connection(pair: Pair, said: bytes) -> None:
    channel, other = pair
    threading.Thread(target=lambda: sent(other, said), daemon=True).start()
    with pytest.raises(LostError):
        while True:
            channel.received(1.0)


def test_what_a_login_shell_says_first_is_passed_over(pair: Pair) -> None:
    channel, other = pair
    noisy = Channel(os.dup(channel.incoming), os.dup(channel.incoming), is_noisy=True)
    other.sendall(b'Welcome to rig0!\n\n{"kind": "join"}\n')
    assert noisy.received(1.0) == [{"kind": "join"}]
    other.sendall(b"Welcome again\n")
    with pytest.raises(LostError):
        noisy.received(1.0)
    noisy.close()


def test_the_last_words_are_read_before_the_connection_counts_as_lost(pair: Pair) -> None:
    channel, other = pair
    other.sendall(b'{"kind": "bye", "exit_code": 3}\n')
    other.shutdown(socket.SHUT_WR)
    assert channel.received(1.0) == [{"kind": "bye", "exit_code": 3}]
    with pytest.raises(LostError, match="the connection has ended"):
        channel.received(1.0)


def test_silence_is_the_end_and_a_beat_is_not(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, other = pair
    monkeypatch.setattr(channels, "SILENT_S", 0.05)
    other.sendall(b'{"kind": "beat"}\n')
    assert channel.received() == []
    with pytest.raises(LostError, match="silent for"):
        while True:
            channel.received(0.02)


def test_a_node_that_has_joined_hears_that_its_lead_lives_until_the_run_ends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    channel, other = pair
    monkeypatch.setattr(channels, "BEAT_S", 0.01)
    monkeypatch.setattr(lead, "LEAVES_S", 0.05)
    every = lead.Nodes(compose.compose(["task=lora_tiny"]), tmp_path, "127.0.0.1", own=None)
    every.add(lead.Member(0, "rig0", channel))
    heard = b""
    while heard.count(b'"beat"') < 3:
        heard += other.recv(4096)
    every.bye(3)
    while data := other.recv(4096):
        heard += data
    assert b'{"kind": "bye", "exit_code": 3}' in heard and channel.is_closed


def test_a_closed_channel_writes_to_no_descriptor_that_got_its_number(pair: Pair) -> None:
    channel, _ = pair
    number = channel.incoming
    channel.close()
    read, write = os.pipe()
    assert number in (read, write), "the lowest free number"
    with pytest.raises(LostError, match="closed"):
        channel.send("beat")
    channel.close()
    os.write(write, b"!")
    assert os.read(read, 9) == b"!"
    os.close(read)
    os.close(write)


def test_a_node_obeys_nobody_who_does_not_know_its_token(pair: Pair) -> None:
    """Neither one that guesses the answer, nor one that sends the node's own challenge back to it."""
    channel, other = pair

    def lead() -> None:
        theirs = channels.of_socket(other.dup())
        theirs.send("challenge", text="c")
        said = theirs.next(5.0, "join")
        assert channels.is_proven(said["proof"], "ours", "c", "node 1"), "the node proves itself"
        theirs.send("welcome", proof=channels.proof("another", said["challenge"], "lead"))

    answering = threading.Thread(target=lead)
    answering.start()
    with pytest.raises(ConfigError, match="HST-03: who answers as the lead does not know the token"):
        member.introduce(channel, 1, token="ours")
    answering.join()


def test_the_proof_of_a_node_is_that_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = channels.proof("token", "challenge", "node 1")
    assert channels.is_proven(proof, "token", "challenge", "node 1")
    for other in (("token", "challenge", "node 2"), ("token", "challenge", "lead"), ("token", "c", "node 1")):
        assert not channels.is_proven(proof, *other)
    assert not channels.is_proven(None, "token", "challenge", "node 1")
    monkeypatch.setenv("RUNSTOP_TOKEN", "secret")
    assert channels.token() == "secret" and "RUNSTOP_TOKEN" not in os.environ
    with pytest.raises(ConfigError, match="no token"):
        channels.token()


def sent(other: socket.socket, text: bytes) -> None:
    try:
        other.sendall(text)
    except OSError:
        return


def test_a_line_of_the_runner_is_on_the_screen_whole_before_anybody_else_writes(tmp_path: Path) -> None:
    screen, kept = (tmp_path / "screen").open("w"), (tmp_path / "kept").open("w")
    with screen, kept:
        tee = Tee(screen, kept)  # one that is gone has been flushed
        print("trial 0", file=tee)
        assert (tmp_path / "screen").read_text() == (tmp_path / "kept").read_text() == "trial 0\n"
