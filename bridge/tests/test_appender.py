"""The appender's tables are complete, and say what callers were promised."""

from __future__ import annotations

import itertools

import pytest
from kio.schema.errors import ErrorCode

from rollbridge.kafka import errors as codes
from rollbridge.kafka.appender import AFTER, PERMISSIONS, AppenderState, Operation, Permission, Result
from rollbridge.kafka.errors import Meaning, meaning


def test_every_state_says_something_to_every_operation() -> None:
    assert set(PERMISSIONS) == set(itertools.product(AppenderState, Operation))


def test_every_result_of_every_operation_leads_somewhere() -> None:
    assert set(AFTER) == set(itertools.product(Operation, Result))


@pytest.mark.parametrize("state", AppenderState)
def test_closing_never_fails(state: AppenderState) -> None:
    assert PERMISSIONS[state, Operation.CLOSE] in (Permission.RUN, Permission.NOTHING)
    assert {AFTER[Operation.CLOSE, result] for result in Result} == {AppenderState.CLOSED}


@pytest.mark.parametrize(
    "state", [item for item in AppenderState if item not in (AppenderState.CLOSED, AppenderState.FENCED)]
)
def test_init_is_the_way_out_of_every_other_state(state: AppenderState) -> None:
    assert PERMISSIONS[state, Operation.INIT] is Permission.RUN


@pytest.mark.parametrize("operation", [item for item in Operation if item is not Operation.CLOSE])
def test_fenced_is_final(operation: Operation) -> None:
    assert PERMISSIONS[AppenderState.FENCED, operation] is Permission.FENCED
    assert AFTER[operation, Result.FENCED] is AppenderState.FENCED


def test_after_an_unknown_outcome_only_init_and_close_run() -> None:
    allowed = {operation for operation in Operation if PERMISSIONS[AppenderState.UNKNOWN, operation] is Permission.RUN}
    assert allowed == {Operation.INIT, Operation.CLOSE}
    assert {AFTER[operation, Result.UNKNOWN] for operation in set(Operation) - {Operation.CLOSE}} == {
        AppenderState.UNKNOWN
    }


def test_what_was_refused_cannot_be_committed() -> None:
    assert AFTER[Operation.APPEND, Result.REFUSED] is AppenderState.MUST_ABORT
    allowed = {
        operation for operation in Operation if PERMISSIONS[AppenderState.MUST_ABORT, operation] is Permission.RUN
    }
    assert allowed == {Operation.ABORT, Operation.INIT, Operation.CLOSE}


TABLES = [codes.PRODUCE, codes.END, codes.INIT, codes.OFFSETS, codes.READ]


@pytest.mark.parametrize("table", TABLES)
def test_only_no_error_is_done(table: dict[ErrorCode, Meaning]) -> None:
    assert [code for code, what in table.items() if what is Meaning.DONE] == [ErrorCode.none]


@pytest.mark.parametrize("table", TABLES)
def test_what_is_not_foreseen_is_unknown(table: dict[ErrorCode, Meaning]) -> None:
    unforeseen = set(ErrorCode) - set(table)
    assert ErrorCode.unknown_server_error in unforeseen
    assert {meaning(table, code) for code in unforeseen} == {Meaning.UNKNOWN}


@pytest.mark.parametrize("table", [codes.PRODUCE, codes.END, codes.INIT, codes.OFFSETS])
def test_both_fencing_codes_fence(table: dict[ErrorCode, Meaning]) -> None:
    fencing = {code for code, what in table.items() if what is Meaning.FENCED}
    assert {code.value for code in fencing} == {47, 90}


def test_definite_refusals_of_a_batch() -> None:
    for code in (
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.corrupt_message,
        ErrorCode.transaction_abortable,
    ):
        assert codes.PRODUCE[code] is Meaning.REFUSED
    assert codes.name(ErrorCode.message_too_large) == "MESSAGE_TOO_LARGE"
