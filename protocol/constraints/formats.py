"""String formats of JSON Schema that are enforced, and stricter patterns for some of them.

All other formats are annotations.
"""

from __future__ import annotations

FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
# In these formats llguidance allows impossible dates and times: the 29th of February of any year,
# the year 0, a second 60 at any minute.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][48]|[2468]0|[13579][26])00)"
_DAY = "(?:(?:0[13-9]|1[0-2])-[0-9]{2}|02-(?:[01][0-9]|2[0-8]))"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = f"^(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
NARROWER = {"date": f"{_DATE}$", "date-time": f"{_DATE}.{{7}}[0-5]", "time": "^.{6}[0-5]"}
