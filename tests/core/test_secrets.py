"""What is masked, what stays, and what tells that a value was masked."""

import pickle

import pytest

from raysim.core.errors import ConfigError, RunError, UserError
from raysim.core.secrets import is_masked, plain_without_secrets, without_secrets


@pytest.mark.parametrize(
    ("address", "masked"),
    [
        ("postgresql://me:hidden@host:5/db", "postgresql://me:***@host:5/db"),
        ("mysql+pymysql://me:hid/den@host/db", "mysql+pymysql://me:***@host/db"),
        ("postgresql://me:hid@den?x#@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:12/hidden@host/db", "postgresql://me:***@host/db"),
        ("mssql+pyodbc:///?odbc_connect=PWD%3Dhidden", "mssql+pyodbc:///?odbc_connect=***"),
        ("https://hidden@host/x", "https://***@host/x"),
        ("https://hidden:x-oauth-basic@host", "https://***@host"),
        ("https://:hidden@host", "https://***@host"),
        ("s3://KEY:hid/den@bucket/x", "s3://***@bucket/x"),
        ("ftp://me:hidden@host", "ftp://***@host"),
        ("ray://me:hidden@host:10001", "ray://***@host:10001"),
        ("https://host/x?password=hidden", "https://host/x?password=***"),
        ("https://host/x?a=1&token=hidden&b=2", "https://host/x?a=1&token=***&b=2"),
        ("https://b.s3.amazonaws.com/x?X-Amz-Signature=hidden", "https://b.s3.amazonaws.com/x?X-Amz-Signature=***"),
        ("https://me:hidden@host/x?api_key=hidden", "https://***@host/x?api_key=***"),
    ],
)
def test_a_secret_in_an_address_is_masked_alone_and_in_a_sentence(address: str, masked: str):
    assert without_secrets(address) == masked
    assert plain_without_secrets({"a": [address]}) == {"a": [masked]}
    assert "hidden" not in without_secrets(f"data.path = '{address}' cannot be read")
    assert without_secrets(masked) == masked
    assert is_masked(masked)
    assert not is_masked(address)


@pytest.mark.parametrize(
    "text",
    [
        "http://host:5000", "https://host/path@v2", "sqlite:////a/b@c.db", "s3://bucket/a@b", "sftp://me@host/data",
        "postgresql://me@host/db", "abfss://container@account.dfs.core.windows.net/x", "none", "auto", "10.0.0.1:6379",
        "RAY_AUTH_MODE=token", "label_column: token", "a name@place", "package.module:attribute",
    ],
)
def test_what_holds_no_secret_stays(text: str):
    assert plain_without_secrets(text) == text
    assert not is_masked(text)


@pytest.mark.parametrize("header", ["Authorization: Bearer {}", "'Authorization': 'Basic {}'", "bearer {}"])
def test_a_token_in_a_header_is_masked_and_words_stay(header: str):
    text = f"401 for {header.format('eyJhbGciOiJIUzI1NiJ9.e30')}, as sent"
    assert without_secrets(text) == f"401 for {header.format('***')}, as sent" == without_secrets(without_secrets(text))
    assert without_secrets("a bearer certificate, authorization: basic knowledge") == (
        "a bearer certificate, authorization: basic knowledge"
    )


def test_a_password_with_spaces_is_masked_where_the_address_stands_alone():
    assert plain_without_secrets("postgresql://me:two words@host/db") == "postgresql://me:***@host/db"


def test_a_message_that_takes_an_address_apart_loses_its_secrets_too():
    said = 'no bucket "KEY:hid/den%40" nor "KEY:hid/den@"; url /x?sig=SIGN; password hid/den@'
    assert without_secrets(said, "s3://KEY:hid/den%40@bucket/x?sig=SIGN") == (
        'no bucket "***" nor "***"; url /x?sig=***; password ***'
    )
    assert without_secrets("a:b failed", "https://host/a:b") == "a:b failed"
    assert without_secrets("nothing of it", "") == "nothing of it"


def test_keys_that_are_called_so_hold_secrets():
    plain = {"token": "hidden", "api_key": "hidden", "nested": {"db_password": "hidden"}, "cls_token": 3, "secret": ""}
    masked = {"token": "***", "api_key": "***", "nested": {"db_password": "***"}, "cls_token": 3, "secret": ""}
    assert plain_without_secrets(plain) == masked
    assert without_secrets("override 'data.token=hidden' is wrong") == "override 'data.token=***' is wrong"
    assert is_masked("***")
    assert plain_without_secrets({"password": 1234, "pwd": True}) == {"password": "***", "pwd": True}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("password='hid den' is wrong", "password=*** is wrong"),
        ('PGPASSWORD="hidden" psql', "PGPASSWORD=*** psql"),
        ("AccountName=a;AccountKey=hidden==;x=1", "AccountName=a;AccountKey=***;x=1"),
        ("update = {'top': 1, 'token': 'hidden', 'x': 2}", "update = {'top': 1, 'token': ***, 'x': 2}"),
        ('{"password": "hid, den"}', '{"password": ***}'),
        ("x = {db_password: hidden}", "x = {db_password: ***}"),
        ("data.token = {a: hid, b: den}: no such key", "data.token = ***: no such key"),
        ("data.token = [hid, den]: no such key", "data.token = ***: no such key"),
        ("data.token = hidden: no such key", "data.token = ***: no such key"),
        ("in line 3:\n  password: hidden\n  ^", "in line 3:\n  password: ***\n  ^"),
        ("it asks for a token: set RAY_AUTH_TOKEN", "it asks for a token: set RAY_AUTH_TOKEN"),
    ],
)
def test_a_secret_in_quotes_or_in_a_mapping_is_masked(text: str, masked: str):
    assert without_secrets(text) == without_secrets(masked) == masked


def test_a_long_word_costs_no_more_than_many_short_ones():
    """Were it tried as the beginning of an address at every letter, this would take an hour."""
    assert without_secrets("x" * 500_000) == "x" * 500_000


@pytest.mark.parametrize("kind", [UserError, RunError])
def test_messages_of_errors_are_masked_also_after_a_journey_between_processes(kind: type[Exception]):
    error = kind("no store at https://hidden@host")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == "no store at https://***@host"


def test_every_problem_of_a_configuration_is_masked():
    error = ConfigError(["data.path = s3://KEY:hidden@b"], "postgresql://me:hidden@h")
    assert "hidden" not in f"{error} {error.problems}"
