"""Read repositories of a Hugging Face hub: their files and checksums, and the content of a file.

The only module that imports huggingface_hub. The hub's address is HF_ENDPOINT. The token is found by huggingface_hub
(HF_TOKEN, or its token file); it is sent to the hub, and neither printed nor stored.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from bench.errors import BenchError, ConfigError

PUBLIC_HUB = "https://huggingface.co"
KINDS = {"model": "model", "data": "dataset"}
"""What `runstop fetch` names, and the hub's types of repositories."""
INSTALL = "pip install 'runstop[fetch]'"
LONGEST_WAIT_S = 30.0
"""For one answer about a repository."""
CONTINUES = "run the same command again: it continues the download"
SILENCE_S = 10.0
"""After so long without a byte, a connection is lost."""
RETRY_WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Before a file is requested again; then the download fails, if no byte came meanwhile."""
CHUNK_BYTES = 1 << 20
PARTIAL, BEYOND_THE_END = 206, 416
"""Statuses: the answer begins where the request says; the file ends before."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a repository. The checksum of a large file (LFS) is its SHA-256. The checksum of another file is the
    SHA-1 of its Git blob."""

    path: str
    bytes: int
    checksum: str
    """sha256:… or git-sha1:…"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """One revision of a repository."""

    kind: str
    name: str
    endpoint: str
    """Without a user name or password."""
    revision: str
    """The commit; a requested branch or tag is resolved."""
    is_gated: bool
    files: tuple[RemoteFile, ...]

    @property
    def page(self) -> str:
        return page(self.kind, self.name, self.endpoint)


class StoppedError(Exception):
    """The download must stop."""


def page(kind: str, name: str, endpoint: str) -> str:
    """Return the address of a repository's page."""
    return f"{endpoint}/{'datasets/' if kind == 'data' else ''}{name}"


def repository(kind: str, name: str, revision: str | None) -> Repository:
    """Return the files of a repository at a revision; None: its default branch.

    Raises:
        ConfigError: huggingface_hub is not installed; there is no such repository or revision, or no access to it.
        BenchError: the hub does not answer, or answers with an error.
    """
    if not _NAME.fullmatch(name):
        fix = "write the name as on the hub, such as meta-llama/Llama-3.1-8B"
        raise ConfigError("the name of a repository must have the form ORG/NAME", where=repr(name), fix=fix)
    library, endpoint = _library(), _endpoint()
    api = library.HfApi(endpoint=endpoint, library_name="runstop")
    with _explained(kind, name, revision):
        info = api.repo_info(name, revision=revision, repo_type=KINDS[kind], timeout=LONGEST_WAIT_S)
        if not isinstance(info.sha, str):
            raise ValueError("the answer has no commit")
        entries = api.list_repo_tree(name, revision=info.sha, repo_type=KINDS[kind], recursive=True)
        files = [_file(entry) for entry in entries if isinstance(entry, library.hf_api.RepoFile)]
    return Repository(
        kind=kind,
        name=name,
        endpoint=_public(endpoint),
        revision=info.sha,
        is_gated=bool(info.gated),
        files=tuple(sorted(files, key=lambda file: file.path)),
    )


def token_source() -> str:
    """Return where the hub's token is from, without its value; empty if there is none."""
    library = _library()
    if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return "HF_TOKEN"
    return str(library.constants.HF_TOKEN_PATH) if library.get_token() else ""


def download(repo: Repository, file: RemoteFile, part: Path, *, received: Callable[[int], None]) -> None:
    """Append the bytes of a file that `part` does not have yet.

    After a lost connection or an error of the hub (5xx), the file is requested again, from its last byte. `received` is
    called with the number of new bytes, and may raise StoppedError.

    Raises:
        ConfigError: as `repository`; or a file of more than 50 GB, which the hub does not send over HTTP.
        BenchError: as `repository`; or the hub sends more or fewer bytes than it states.
    """
    import httpx2

    library = _library()
    if file.bytes > library.constants.MAX_HTTP_DOWNLOAD_SIZE:
        fix = f"run `hf download {repo.name} {file.path}`, which can download such files"
        raise ConfigError("the hub does not send files of more than 50 GB over HTTP", where=file.path, fix=fix)
    failed, lost = 0, None
    with _explained(repo.kind, repo.name, repo.revision, file=file.path), part.open("ab") as target:
        while (before := target.tell()) != file.bytes:
            try:
                _append(library, repo, file, target, received)
            except (httpx2.TransportError, library.errors.HfHubHTTPError) as error:
                status = error.response.status_code if isinstance(error, library.errors.HfHubHTTPError) else None
                if status == BEYOND_THE_END:
                    target.truncate(0)
                    raise _wrong_length(repo, file, before) from error
                if status is not None and status < 500:
                    raise
                lost = error
            if target.tell() == file.bytes:
                break
            failed = 0 if target.tell() > before else failed + 1
            if failed > len(RETRY_WAITS_S):
                raise lost or _wrong_length(repo, file, target.tell())
            received(0)
            time.sleep(RETRY_WAITS_S[max(failed - 1, 0)])
        target.flush()
        os.fsync(target.fileno())


def _append(
    library: Any, repo: Repository, file: RemoteFile, target: BinaryIO, received: Callable[[int], None]
) -> None:
    """Ask for the missing bytes of a file once; BenchError if the answer has another length than the file."""
    at = target.tell()
    headers = {**library.utils.build_hf_headers(library_name="runstop"), "Accept-Encoding": "identity"}
    if at:
        headers["Range"] = f"bytes={at}-"
    url = library.hf_hub_url(
        repo.name, file.path, repo_type=KINDS[repo.kind], revision=repo.revision, endpoint=_endpoint()
    )
    with library.utils.get_session().stream("GET", url, headers=headers, timeout=SILENCE_S) as response:
        if response.is_error:
            response.read()
        library.utils.hf_raise_for_status(response)
        if at and response.status_code != PARTIAL:
            target.truncate(0)
            target.seek(0)
            received(-at)
        for chunk in response.iter_raw(CHUNK_BYTES):
            target.write(chunk)
            received(len(chunk))
    if (size := target.tell()) > file.bytes:
        target.truncate(0)
        raise _wrong_length(repo, file, size)


def _wrong_length(repo: Repository, file: RemoteFile, size: int) -> BenchError:
    what = f"the hub sent {size:,} bytes of this file instead of {file.bytes:,}"
    fix = "run the same command again; if that also fails, a proxy or mirror (HF_ENDPOINT) changes the file"
    return BenchError(what, where=f"{repo.page}, {file.path}", fix=fix)


def _library() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors, hf_api  # noqa: F401  # attributes of the package
    except ModuleNotFoundError as error:
        what = f"the package {error.name} is not installed"
        raise ConfigError(what, where="this Python", fix=INSTALL) from error
    return huggingface_hub


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or PUBLIC_HUB


def _public(endpoint: str) -> str:
    """Return an address without a user name and password."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _file(entry: Any) -> RemoteFile:
    """Return a file of the hub's answer; ValueError if it is not a path, a size and a checksum."""
    checksum = f"git-sha1:{entry.blob_id}" if entry.lfs is None else f"sha256:{entry.lfs.sha256}"
    size = entry.size if entry.lfs is None else entry.lfs.size
    if (
        not isinstance(size, int)
        or size < 0
        or not re.fullmatch(r"git-sha1:[0-9a-f]{40}|sha256:[0-9a-f]{64}", checksum)
    ):
        raise ValueError(f"the entry of {entry.path!r} has no valid size or checksum")
    return RemoteFile(path=entry.path, bytes=size, checksum=checksum)


@contextmanager
def _explained(kind: str, name: str, revision: str | None, *, file: str | None = None) -> Iterator[None]:
    """Replace the errors of huggingface_hub, its HTTP client and the disk by our own."""
    import httpx2
    from huggingface_hub import errors

    address = page(kind, name, _public(_endpoint()))
    where = f"{address}, {file}" if file else address
    try:
        yield
    except (StoppedError, BenchError):
        raise
    except errors.OfflineModeIsEnabled as error:
        fix = "run the command without HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE: env -u HF_HUB_OFFLINE runstop fetch …"
        raise ConfigError("HF_HUB_OFFLINE forbids connections to the hub", where="HF_HUB_OFFLINE", fix=fix) from error
    except errors.HfHubHTTPError as error:
        raise _refused(error, kind, where, address, revision) from error
    except httpx2.HTTPError as error:
        host = urlsplit(address).netloc
        fix = f"check this machine's network, HTTPS_PROXY and HF_ENDPOINT; then {CONTINUES}"
        what = f"runstop cannot connect to {host}: {error or type(error).__name__}"
        raise BenchError(what, where=where, fix=fix) from error
    except OSError as error:
        raise _of_the_disk(error, where) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the server does not answer as a Hugging Face hub: {type(error).__name__}: {str(error)[:200]}"
        fix = "check that HF_ENDPOINT is correct, and that no proxy or login page answers instead of the hub"
        raise BenchError(what, where=where, fix=fix) from error


def _of_the_disk(error: OSError, where: str) -> BenchError:
    what = f"cannot write: {error.strerror or error}"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = f"free disk space; then {CONTINUES}" if full else "give this user write permission for the folder"
    return BenchError(what, where=str(error.filename or where), fix=fix, rule="CFG-08")


def _refused(error: Any, kind: str, where: str, address: str, revision: str | None) -> BenchError:
    """Return the error for an answer of the hub that is not a success."""
    from huggingface_hub import errors

    status = error.response.status_code
    log_in = "set HF_TOKEN to a token of an account that may read this repository, or run `hf auth login`"
    token = token_source()
    sent = f"the token from {token} was sent" if token else "no token was sent"
    if isinstance(error, errors.GatedRepoError):
        what = f"the repository is gated, and access was not granted; {sent}"
        return ConfigError(what, where=where, fix=f"accept the terms on {address}; then {log_in}")
    if isinstance(error, errors.RevisionNotFoundError):
        fix = f"set --revision to a commit, branch or tag that {address}/tree/main lists, or remove --revision"
        return ConfigError(f"the repository has no revision {revision}", where=where, fix=fix)
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return BenchError("the hub lists this file, but does not have it", where=where, fix="choose another --revision")
    if status == 401 and token and not isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(f"the hub refuses the token from {token}", where=where, fix=f"{log_in}, or remove the token")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        other, noun = ("data", "data set") if kind == "model" else ("model", "model")
        fix = f"correct the name; if this is a {noun}, run `runstop fetch {other}`; "
        fix += f"if the repository is private, {log_in}"
        return ConfigError(f"there is no such repository, or it is private; {sent}", where=where, fix=fix)
    if status == 403:
        return ConfigError(f"the hub forbids access (HTTP 403); {sent}", where=where, fix=log_in)
    if status == 429:
        fix = f"wait some minutes; then {CONTINUES}. With a token, the hub allows more requests"
        return BenchError("the hub refuses more requests for now (429)", where=where, fix=fix)
    return BenchError(f"the hub answers with status {status}", where=where, fix=f"wait; then {CONTINUES}")
