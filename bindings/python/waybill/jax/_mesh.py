# SPDX-License-Identifier: Apache-2.0
"""One process a device (jax.distributed): how the processes of a program find each other. They publish an address in JAX's key-value store."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import threading
from typing import Any

import jax

from .. import _device

TIMEOUT_S = 60  # longest wait for a peer, at start and in a call
_lock = threading.Lock()
_done = False


def _host(coordinator: str) -> str:
    """A numeric address of this machine that the others reach: $WAYBILL_HOST, or that of the route to the coordinator."""
    if os.environ.get("WAYBILL_HOST"):
        return os.environ["WAYBILL_HOST"]
    name, _, port = coordinator.rpartition(":")
    family, _, _, _, address = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def ensure(lib: ctypes.CDLL) -> None:
    """Sets the connections between processes up, once; every process traces the same program and so comes here. RuntimeError says what is missing."""
    global _done
    if _done or jax.process_count() == 1:
        return
    with _lock:
        if not _done:
            _set_up(lib)
            _done = True


def _store() -> tuple[Any, str]:
    """JAX's key-value store and where its process 0 listens."""
    from jax._src import distributed  # the store has no public name

    state = distributed.global_state
    if state.client is None or state.coordinator_address is None:
        raise RuntimeError(f"{jax.process_count()} processes but no jax.distributed.initialize(): Waybill's processes find each other through its store")
    return state.client, state.coordinator_address


def _set_up(lib: ctypes.CDLL) -> None:
    client, coordinator = _store()
    me, prefix = jax.process_index(), "waybill/jax/"
    if me == 0:
        client.key_value_set(prefix + "secret", secrets.token_hex(24))
    secret = _get(client, prefix + "secret", 0)
    host = _host(coordinator)
    port, error = ctypes.c_int(0), ctypes.create_string_buffer(512)
    if lib.wbx_mesh_listen(host.encode(), secret.encode(), ctypes.byref(port), error, len(error)):
        raise RuntimeError(f"waybill.jax: {error.value.decode()}; set WAYBILL_HOST to a numeric address of this machine that the others reach")
    client.key_value_set(f"{prefix}address/{me}", f"{host} {port.value}")
    for index in range(jax.process_count()):
        peer, peer_port = _get(client, f"{prefix}address/{index}", index).split(" ")
        lib.wbx_mesh_set_peer(index, peer.encode(), int(peer_port))
    lib.wbx_mesh_start(me, TIMEOUT_S * 1000)


def device_peers(number: int) -> _device.Peers:
    """How the processes of this program's `number`-th group on GPUs find each other; every process makes its groups in one order."""
    client, coordinator = _store()
    key = f"waybill/device/{number}"

    def publish(port: int) -> int:
        if jax.process_index() == 0:
            client.key_value_set(key, str(port))
        return int(_get(client, key, 0))

    return _device.Peers(jax.process_index(), jax.process_count(), coordinator.rpartition(":")[0].strip("[]"), publish)


def gather(number: int, what: str, data: bytes) -> list[bytes]:
    """`data` of every process in their order, for the `number`-th group on GPUs. RuntimeError where a process makes another `what`."""
    client, me, key = _store()[0], jax.process_index(), f"waybill/given/{number}"
    client.key_value_set(f"{key}/{me}", f"{what} {data.hex()}")
    given = [_get(client, f"{key}/{index}", index).split(" ") for index in range(jax.process_count())]
    for index, (name, _) in enumerate(given):
        if name != what:
            raise RuntimeError(f"waybill.jax: process {me} makes a {what} where process {index} makes a {name}; all must trace the same calls in one order")
    return [bytes.fromhex(text) for _, text in given]


def _get(client: object, key: str, process: int) -> str:
    try:
        return client.blocking_key_value_get(key, TIMEOUT_S * 1000)  # type: ignore[attr-defined]
    except Exception as error:
        raise RuntimeError(f"waybill.jax: process {process} has not come within {TIMEOUT_S} s ({error})") from None
