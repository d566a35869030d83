"""Access control by request headers: host, origin and API key, with a rate limit on wrong keys; and the tenant whose
caches a request shares."""

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

FREE, RATE = 10, 1.0  # burst of wrong keys per address, then wrong keys per second
LONG = 16  # characters from which a key is too long to guess
ADDRESSES = 1024  # most recent addresses remembered
HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s@:/?#\[\]\\]+)(:\d{0,5})?")
ROUNDS = 100_000  # slows down guessing a key from file names


class Keys:
    """Compares keys in constant time, with a rate limit per address after `FREE` wrong keys. At the limit, only keys of
    at least `LONG` characters are compared: they cannot be guessed, and their owners may share the address. Not
    thread-safe.

    wrong: keys refused since the start.
    """

    def __init__(self):
        self.wrong = 0
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()  # wrong keys, time

    def check(self, given: str, keys: tuple[str, ...], peer: str) -> None:
        """Check a client's key, "" for none. Raises Refused."""
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
        if given:  # a missing key is no guess: pages prompt for one after the error
            self._debts[who] = (debt + 1, now)
            self._debts.move_to_end(who)
            if len(self._debts) > ADDRESSES:
                self._debts.popitem(last=False)
            self.wrong += 1
        raise Refused(401, "[Authorization] missing or wrong API key", "invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()  # equal lengths for the comparison


def _network(peer: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address: one customer owns all of it."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def check_host(headers: Mapping[str, str], options: ServeOptions, method: str = "GET") -> None:
    """Reject requests from web pages that are not allowed, except followed links. Raises Refused."""
    host = headers.get("Host") or ""
    match = HOST.fullmatch(host)
    name = match["name"].strip("[]").lower() if match else ""
    if options.local and name not in (*LOOPBACK, options.host):
        # DNS rebinding: a web page's host name that resolves to this machine.
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


# Cached-token counts and time to first token reveal earlier prompts, so tenants share no caches.
def tenant(key: str | None, user: str = "", salt: str = "") -> str:
    """Return the tenant's name, a digest of API key, user and salt that reveals none of them; "" if all are
    missing."""
    if not (key or user or salt):
        return ""
    parts = [_mark(key) if key else "", user, salt]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@lru_cache(1024)
def _mark(key: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", key.encode(), b"mlxkv tenant", ROUNDS).hex()
