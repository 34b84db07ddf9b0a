"""The address of a server: its URL, and the token that it is given."""

import pytest

from quantmill.client.target import Target
from quantmill.common.program import UserError


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://me:sk-1@host", "http://host?key=sk-1"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is not the URL of a server; write http://HOST:PORT") as error:
        Target(url)
    assert "sk-1" not in str(error.value)
    with pytest.raises(UserError, match="its token cannot be sent in a header") as error:
        Target("http://host", token="sk-1\r\nX: y")
    assert "sk-1" not in str(error.value)
