"""Does a prompt whose state is reloaded continue as one computed cold?"""

import pytest


@pytest.mark.boundary("2C-1", "2C", "2C+1")
def test_a_reload_continues_as_cold(cold_reload):
    row = cold_reload()
    assert row.credited == row.boundary, "as many tokens are credited as were restored"
