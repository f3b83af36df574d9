"""Tokens: by role, private on disk, never shown."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from astraflow.errors import AstraFlowError, ConfigError, Unauthorised
from astraflow.rollout.endpoint import engine_token
from astraflow.wire.calls import Role
from astraflow.wire.serve_relay import relay_token
from astraflow.wire.tokens import ENVIRONMENT, Grant, Tokens, from_environment, is_bearer_of, lend


def test_f96_file_is_private_and_round_trips(tmp_path: Path) -> None:
    tokens = Tokens.make(["p", "q"])
    path = tokens.write(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Tokens.read(tmp_path) == tokens
    Tokens.make(["p"]).write(tmp_path)
    assert Tokens.read(tmp_path) != tokens
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.json"]


def test_grants_by_role() -> None:
    tokens = Tokens.make(["p", "q"])
    assert tokens.grant(tokens.of(Role.WORKER)) == Grant(Role.WORKER)
    assert tokens.grant(tokens.of(Role.OPERATOR)) == Grant(Role.OPERATOR)
    assert tokens.grant(tokens.of(Role.TRAINER, "q")) == Grant(Role.TRAINER, "q")
    with pytest.raises(ConfigError, match="a trainer's token is of a policy"):
        tokens.of(Role.TRAINER)


def test_a_policy_that_joins_later_has_a_token_that_only_the_run_folder_can_make() -> None:
    tokens, others = Tokens.make(["p"]), Tokens.make(["p"])
    late = tokens.of(Role.TRAINER, "r")
    assert tokens.grant(late) == Grant(Role.TRAINER, "r") and late != others.of(Role.TRAINER, "r")
    proof = late.rpartition(":")[2]
    for forged in (
        f"p:{proof}",
        f"q:{proof}",
        f"r:{proof[:-1]}0",
        f"r:{tokens.operator}",
        "r:",
        others.of(Role.TRAINER, "r"),
    ):
        with pytest.raises(Unauthorised):
            tokens.grant(forged)


@pytest.mark.parametrize("token", ["", "x", "ä" * 20, "\udc80", "x" * 10_000])
def test_unknown_tokens(token: str) -> None:
    with pytest.raises(Unauthorised) as caught:
        Tokens.make(["p"]).grant(token)
    assert len(str(caught.value)) < 200


def test_f96_tokens_are_in_no_repr_log_or_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens.make(["p"])
    logging.getLogger("x").warning("%s %r", tokens, tokens)
    texts = [repr(tokens), str(tokens), caplog.text, repr(tokens.grant(tokens.worker))]
    path = tokens.write(tmp_path)
    path.write_text(path.read_text()[:-2])
    with pytest.raises(ConfigError) as caught:
        Tokens.read(tmp_path)
    texts += [str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)[:0]]
    for secret in (tokens.worker, tokens.operator, tokens.trainers["p"]):
        assert not any(secret in text for text in texts)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"worker":1,"operator":"x","trainers":{}}', '{"worker":"a","operator":"b","trainers":{}}']
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="missing"):
        Tokens.read(tmp_path)
    (tmp_path / "tokens.json").write_text(text)
    with pytest.raises(AstraFlowError) as caught:
        Tokens.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_short_or_equal_tokens_are_refused() -> None:
    with pytest.raises(ConfigError):
        Tokens(worker="a" * 20, operator="a" * 20, trainers={})
    with pytest.raises(ConfigError):
        Tokens(worker="a" * 20, operator="short", trainers={})


def test_f96_tokens_between_workers_are_not_the_worker_s_and_differ_by_purpose() -> None:
    """What one worker sends to a port that another announced is worth nothing at dataflow."""
    tokens = Tokens.make(["p"])
    between = {relay_token(tokens.worker), engine_token(tokens.worker)}
    assert len(between) == 2 and None not in between
    for token in between:
        with pytest.raises(Unauthorised):
            tokens.grant(str(token))
    assert relay_token(None) is None and engine_token(None) is None


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic secret", "secret", "Bearer secre", "Bearer \udcff"])
def test_f96_a_header_that_does_not_hold_the_token(header: str) -> None:
    assert not is_bearer_of("secret", header)
    assert is_bearer_of("secret", "bearer secret") and is_bearer_of("secret", "Bearer  secret ")


def test_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert from_environment() is None
    monkeypatch.setenv(ENVIRONMENT, "t")
    assert from_environment() == "t"


@pytest.mark.parametrize(
    ("role", "policy", "lent"),
    [(Role.WORKER, None, "worker"), (Role.TRAINER, "p", "p"), (Role.TRAINER, "q", "q"), (Role.TRAINER, None, None)],
)
def test_a_run_folder_on_this_machine_lends_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, policy: str | None, lent: str | None
) -> None:
    tokens = Tokens.make(["p", "q"])
    tokens.write(tmp_path)
    monkeypatch.setenv(ENVIRONMENT, "")
    lend(tmp_path, role, policy)
    expected = {"worker": tokens.worker, **tokens.trainers}.get(lent or "")
    assert from_environment() == expected, "of two policies nobody knows which"


def test_a_token_that_was_given_stays_and_a_folder_without_one_lends_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "")
    lend(None, Role.WORKER)
    lend(tmp_path, Role.WORKER)
    assert from_environment() is None
    Tokens.make(["only"]).write(tmp_path)
    lend(tmp_path, Role.TRAINER)
    assert from_environment() == Tokens.read(tmp_path).trainers["only"]
    lend(tmp_path, Role.WORKER)
    assert from_environment() == Tokens.read(tmp_path).trainers["only"], "it was given one"
