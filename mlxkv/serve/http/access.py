"""Who may ask: hosts, origins and keys, from the head of a request. Wrong keys are slowed down. And whose caches a
request reads and fills."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from math import ceil

from mlxkv.serve.options import LOOPBACK, ServeOptions
from mlxkv.serve.refusals import Refused

FREE, RATE = 10, 1.0  # wrong keys that an address may send at once, and then each second
LONG = 16  # characters of a key that is not guessed at any speed
ADDRESSES = 1024  # that are remembered: the latest
HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s@:/?#\[\]\\]+)(:\d{0,5})?")
ROUNDS = 100_000  # a key cannot be guessed fast from the names of files


class Keys:
    """Compares keys in constant time. An address that sent `FREE` wrong ones waits for the next try: its guesses are
    compared meanwhile with keys of `LONG` characters alone, which nobody guesses, so that who has one of them is let
    in from the same address. For one thread.

    wrong: keys refused since the start.
    """

    def __init__(self):
        self.wrong = 0
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # wrong keys, and when

    def check(self, given: str, keys: tuple[str, ...], peer: str) -> None:
        """Compare a key that a client sent, "" for none. Raises Refused."""
        now, who = time.monotonic(), _network(peer)
        debt, then = self._debts.get(who, (0.0, now))
        debt = max(0.0, debt - (now - then) * RATE)
        is_guessing = given and debt > FREE - 1
        same = [
            hmac.compare_digest(_digest(given), _digest(key))
            for key in keys
            if len(key) >= LONG or not is_guessing
        ]
        if any(same):  # compared with all of them, whichever it is
            return
        if is_guessing:
            wait = ceil((debt - FREE + 1) / RATE)
            reason = f"[Authorization] too many wrong keys from this address; wait {wait} s"
            raise Refused(429, reason, "invalid_api_key", retry=wait)
        if given:  # none at all is no guess: pages ask for a key when they are told
            self._debts[who] = (debt + 1, now)
            self._debts.move_to_end(who)
            if len(self._debts) > ADDRESSES:
                self._debts.popitem(last=False)
            self.wrong += 1
        raise Refused(401, "[Authorization] missing or wrong API key", "invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()  # of one length


def _network(peer: str) -> str:
    """Return an address, or for IPv6 the network of 64 bits that one customer has."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def check_host(headers: Mapping[str, str], options: ServeOptions, method: str = "GET") -> None:
    """Keep out web pages that were not allowed; their links may lead here. Raises Refused."""
    host = headers.get("Host") or ""
    match = HOST.fullmatch(host)
    name = match["name"].strip("[]").lower() if match else ""
    if options.local and name not in (*LOOPBACK, options.host):
        # DNS rebinding: a web page's own name that was made to point here.
        raise Refused(403, "[Host] this server is for this machine alone")
    origin = headers.get("Origin")
    if origin is None and method == "POST" and headers.get("Sec-Fetch-Site") == "cross-site":
        origin = "a page of another site"
    allowed = (f"http://{host}", f"https://{host}", *options.origins)
    if origin is not None and origin not in allowed and "*" not in options.origins:
        raise Refused(403, f"[Origin] {origin[:80]} may not ask; see --allow-origin")


def given_key(headers: Mapping[str, str]) -> str:
    """Return the key in the header Authorization, or in Anthropic's x-api-key; "" for none."""
    value = headers.get("Authorization") or headers.get("x-api-key") or ""
    scheme, _, key = value.partition(" ")
    return (key if scheme.lower() == "bearer" else value).strip()


# How much of a prompt was known already, and how fast the reply begins, tell what others have asked before. So nobody's
# caches are found by others.
def tenant(key: str | None, user: str = "", salt: str = "") -> str:
    """Return the name of whoever asks: of an API key, and of a user and a salt that a request names. It tells none
    of them. "" for all who have none."""
    if not (key or user or salt):
        return ""
    parts = [_mark(key) if key else "", user, salt]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@lru_cache(1024)
def _mark(key: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", key.encode(), b"mlxkv tenant", ROUNDS).hex()
