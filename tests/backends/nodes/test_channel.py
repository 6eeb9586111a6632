"""The connection between nodes: authentication, loss of the connection, and invalid messages."""

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
    """A channel, and the raw socket at the other end."""
    ours, theirs = socket.socketpair()
    channel = channels.from_socket(ours)
    with theirs:
        yield channel, theirs
    channel.close()


def test_messages_arrive_complete_and_in_order_from_any_fragments(pair: Pair) -> None:
    channel, other = pair
    text = b'{"kind": "a", "n": 1}\n{"kind": "beat"}\n{"kind": "b", "t": "\xc3\xb6"}\n'
    got = []
    for start in range(0, len(text), 7):
        other.sendall(text[start : start + 7])
        got += channel.received()
    assert got == [{"kind": "a", "n": 1}, {"kind": "b", "t": "ö"}]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"no": "kind"}\n', b"\xff\n", b"x" * (2**21 + 1)])
def test_invalid_messages_end_the_connection(pair: Pair, data: bytes) -> None:
    channel, other = pair
    threading.Thread(target=lambda: sent(other, data), daemon=True).start()
    with pytest.raises(LostError):
        while True:
            channel.received(1.0)


def test_output_of_a_login_shell_before_the_first_message_is_skipped(pair: Pair) -> None:
    channel, other = pair
    noisy = Channel(os.dup(channel.incoming), os.dup(channel.incoming), is_noisy=True)
    other.sendall(b'Welcome to rig0!\n\n{"kind": "join"}\n')
    assert noisy.received(1.0) == [{"kind": "join"}]
    other.sendall(b"Welcome again\n")
    with pytest.raises(LostError):
        noisy.received(1.0)
    noisy.close()


def test_the_last_messages_are_read_before_the_connection_counts_as_lost(pair: Pair) -> None:
    channel, other = pair
    other.sendall(b'{"kind": "shutdown", "exit_code": 3}\n')
    other.shutdown(socket.SHUT_WR)
    assert channel.received(1.0) == [{"kind": "shutdown", "exit_code": 3}]
    with pytest.raises(LostError, match="the connection was closed"):
        channel.received(1.0)


def test_a_connection_without_heartbeat_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, other = pair
    monkeypatch.setattr(channels, "SILENT_S", 0.05)
    other.sendall(b'{"kind": "beat"}\n')
    assert channel.received() == []
    with pytest.raises(LostError, match="no heartbeat has arrived for"):
        while True:
            channel.received(0.02)


def test_the_lead_sends_heartbeats_until_the_run_ends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    channel, other = pair
    monkeypatch.setattr(channels, "BEAT_S", 0.01)
    monkeypatch.setattr(lead, "SHUTDOWN_TIMEOUT_S", 0.05)
    every = lead.Nodes(compose.compose(["task=lora_tiny"]), tmp_path, "127.0.0.1", own=None)
    every.add(lead.Member(0, "rig0", channel))
    received = b""
    while received.count(b'"beat"') < 3:
        received += other.recv(4096)
    every.shutdown(3)
    while data := other.recv(4096):
        received += data
    assert b'{"kind": "shutdown", "exit_code": 3}' in received and channel.is_closed


def test_a_closed_channel_does_not_write_to_a_reused_descriptor(pair: Pair) -> None:
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


def test_a_node_refuses_a_lead_without_its_token(pair: Pair) -> None:
    """A lead with another token sends a wrong answer to the node's challenge."""
    channel, other = pair

    def lead() -> None:
        theirs = channels.from_socket(other.dup())
        theirs.send("challenge", text="c")
        request = theirs.next(5.0, "join")
        assert channels.is_valid_proof(request["proof"], "ours", "c", "node 1"), "the node authenticates itself"
        theirs.send("welcome", proof=channels.proof("another", request["challenge"], "lead"))

    answering = threading.Thread(target=lead)
    answering.start()
    with pytest.raises(
        ConfigError, match="HST-03: another program listens at the address of --lead: it does not know the token"
    ):
        member.authenticate(channel, 1, token="ours")
    answering.join()


def test_a_proof_is_valid_for_one_node_and_challenge_only(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = channels.proof("token", "challenge", "node 1")
    assert channels.is_valid_proof(proof, "token", "challenge", "node 1")
    for other in (("token", "challenge", "node 2"), ("token", "challenge", "lead"), ("token", "c", "node 1")):
        assert not channels.is_valid_proof(proof, *other)
    assert not channels.is_valid_proof(None, "token", "challenge", "node 1")
    monkeypatch.setenv("RUNSTOP_TOKEN", "secret")
    assert channels.token() == "secret" and "RUNSTOP_TOKEN" not in os.environ
    with pytest.raises(ConfigError, match="the token .* is not set"):
        channels.token()


def sent(other: socket.socket, text: bytes) -> None:
    try:
        other.sendall(text)
    except OSError:
        return


def test_a_line_of_the_runner_is_flushed_completely(tmp_path: Path) -> None:
    screen, kept = (tmp_path / "screen").open("w"), (tmp_path / "kept").open("w")
    with screen, kept:
        tee = Tee(screen, kept)  # every line is flushed
        print("trial 0", file=tee)
        assert (tmp_path / "screen").read_text() == (tmp_path / "kept").read_text() == "trial 0\n"
