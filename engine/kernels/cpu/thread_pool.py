"""Thread pool of the CPU kernels: a job is cut into items, and awake threads take the next one.

The calling thread takes part. It waits only for items that another thread has started, never for a
thread that sleeps or has lost its core to other work: a busy machine makes it slower in proportion,
but does not stop it. An idle thread spins for a moment, then sleeps on a semaphore.

Threads synchronise through the words of one array. `OPEN` is set while a job may be joined. A
thread that joins increments `ACTIVE` before it reads `OPEN`; the thread that ends a job clears
`OPEN` before it reads `ACTIVE`. So no thread reads a job while the next one is being written.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from .jit_cache import compiled, intrinsic

# Words of the array; those that different threads write are on separate cache lines.
OPEN, NEXT, ACTIVE, BUSY, SLEEPING = 0, 8, 16, 24, 32
FUNCTION, DATA, COUNT = 40, 41, 42
SIZE = 43
SEMAPHORE, NUM_WORDS = 48, 64
# Spins of an idle thread before it sleeps: some 100 µs, the time between two kernels.
SPINS = 3000
SPINS_BEFORE_YIELD = 1000

WORD = ir.IntType(64)
INT = ir.IntType(32)
POINTER = ir.IntType(8).as_pointer()

Pool = NDArray[np.int64]
_pools: list[Pool] = []
_start_lock = threading.Lock()


def shared_pool() -> Pool:
    """Return the process's thread pool; the first call starts its threads.

    It has as many threads as torch, including the calling one.
    """
    if not _pools:
        with _start_lock:
            if not _pools:
                _pools.append(_start_pool(torch.get_num_threads() - 1))
    return _pools[0]


def pool_size() -> int:
    """Return the number of threads of the pool; torch may have fewer by now."""
    return int(shared_pool()[SIZE])


def _start_pool(num_others: int) -> Pool:
    words = np.zeros(NUM_WORDS, np.int64)
    words[SIZE] = 1
    libc = ctypes.CDLL(None)
    semaphore = ctypes.c_void_p(words.ctypes.data + SEMAPHORE * words.itemsize)
    # Without semaphores in memory (macOS) every kernel runs on its caller's thread.
    if num_others and libc.sem_init(semaphore, 0, 0) == 0:
        words[SIZE] += num_others
        for number in range(num_others):
            threading.Thread(
                target=worker_loop, args=(words,), name=f"tidemill-kernels-{number}", daemon=True
            ).start()
    return words


@intrinsic
def parallel_for(typing: Any, words: Any, _count: Any, item: Any, arguments: Any) -> Any:
    """Call `item(i, *arguments)` for all i below a count, on all threads, in any order.

    `item` is a compiled function that returns nothing and raises nothing; its arguments must
    outlive the call. A pool runs one job at a time; concurrent ones run on their caller's thread.
    """
    called = typing.resolve_function_type(item, (types.int64, *arguments.types), {})
    runner = typing.resolve_value_type(_run_job)
    ran = typing.resolve_function_type(runner, (words, types.int64, types.int64, types.int64), {})

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        box = cgutils.alloca_once_value(builder, args[3])
        module = builder.module
        function = ir.Function(
            module, ir.FunctionType(ir.VoidType(), [WORD, WORD]), module.get_unique_name("item")
        )
        function.linkage = "internal"
        inner = ir.IRBuilder(function.append_basic_block())
        stored = context.get_value_type(signature.args[3])
        given = inner.load(inner.inttoptr(function.args[0], stored.as_pointer()))
        values = [inner.extract_value(given, i) for i in range(len(arguments.types))]
        compiled_item = item.dispatcher.overloads[called.args]
        context.call_conv.call_function(
            inner,
            context.declare_function(module, compiled_item.fndesc),
            called.return_type,
            called.args,
            [function.args[1], *values],
        )
        inner.ret_void()
        run = context.get_function(runner, ran)
        places = [builder.ptrtoint(place, WORD) for place in (function, box)]
        run(builder, [args[0], args[1], *places])
        context.add_linking_libs([compiled_item.library, *run.libs])
        return context.get_dummy_value()

    return types.void(words, types.int64, item, arguments), generate


def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Return the pointer to the word that the first two arguments of an intrinsic name."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


@intrinsic
def _read(_typing: Any, words: Any, _index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, args), "seq_cst", 8)

    return types.int64(words, types.int64), generate


@intrinsic
def _write(_typing: Any, words: Any, _index: Any, _value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _place(context, builder, signature, args), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


def _atomic_op(operation: str) -> Any:
    """Return the intrinsic of an atomic operation on a word, which returns its old value."""

    @intrinsic
    def change(_typing: Any, words: Any, _index: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = _place(context, builder, signature, args)
            return builder.atomic_rmw(operation, place, args[2], "seq_cst")

        return types.int64(words, types.int64, types.int64), generate

    return change


atomic_add, _exchange = _atomic_op("add"), _atomic_op("xchg")


@intrinsic
def _replace(_typing: Any, words: Any, _index: Any, _old: Any, _new: Any) -> Any:
    """Compare and swap: write `new` if the word is `old`; return whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, signature, args)
        result = builder.cmpxchg(place, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(words, types.int64, types.int64, types.int64), generate


def _libc_call(name: str) -> Any:
    """Return the intrinsic that calls a C library function on the address of a word."""

    @intrinsic
    def call(_typing: Any, words: Any, _index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            declared = ir.FunctionType(INT, [POINTER])
            function = cgutils.get_or_insert_function(builder.module, declared, name)
            place = _place(context, builder, signature, args)
            builder.call(function, [builder.bitcast(place, POINTER)])
            return context.get_dummy_value()

        return types.void(words, types.int64), generate

    return call


_sem_wait, _sem_post = _libc_call("sem_wait"), _libc_call("sem_post")


def _plain_call(name: str, result: Any) -> Any:
    """Return the intrinsic that calls a function without arguments."""

    @intrinsic
    def call(_typing: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            declared = ir.FunctionType(result, [])
            builder.call(cgutils.get_or_insert_function(builder.module, declared, name), [])
            return context.get_dummy_value()

        return types.void(), generate

    return call


_yield = _plain_call("sched_yield", INT)
_pause = (
    _plain_call("llvm.x86.sse2.pause", ir.VoidType())
    if platform.machine() in ("x86_64", "AMD64")
    else _yield
)


@intrinsic
def _call(_typing: Any, _function: Any, _data: Any, _item: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        declared = ir.FunctionType(ir.VoidType(), [WORD, WORD])
        builder.call(builder.inttoptr(args[0], declared.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@compiled
def _run_items(words: Any, function: Any, data: Any, count: Any) -> None:
    item = atomic_add(words, NEXT, 1)
    while item < count:
        _call(function, data, item)
        item = atomic_add(words, NEXT, 1)


@compiled
def _run_job(words: Any, count: Any, function: Any, data: Any) -> None:
    if count <= 1 or not _replace(words, BUSY, 0, 1):
        for item in range(count):
            _call(function, data, item)
        return
    words[FUNCTION], words[DATA], words[COUNT] = function, data, count
    _write(words, NEXT, 0)
    _write(words, OPEN, 1)
    for _ in range(_exchange(words, SLEEPING, 0)):
        _sem_post(words, SEMAPHORE)
    _run_items(words, function, data, count)
    _write(words, OPEN, 0)
    looks = 0
    while _read(words, ACTIVE) != 0:
        looks += 1
        if looks % SPINS_BEFORE_YIELD == 0:
            _yield()
        else:
            _pause()
    _write(words, BUSY, 0)


@compiled
def worker_loop(words: Any) -> None:
    """Run items of jobs for ever: the main loop of a pool thread."""
    looks = 0
    while True:
        if _read(words, OPEN) == 0:
            looks += 1
            if looks > SPINS:
                _sleep(words)
                looks = 0
            else:
                _pause()
            continue
        looks = 0
        atomic_add(words, ACTIVE, 1)
        if _read(words, OPEN) != 0:
            _run_items(words, words[FUNCTION], words[DATA], words[COUNT])
            # No items are left: the job is closed.
            _write(words, OPEN, 0)
        atomic_add(words, ACTIVE, -1)


@compiled
def _sleep(words: Any) -> None:
    """Sleep until woken, unless there is work: each thread counted in `SLEEPING` is posted once."""
    atomic_add(words, SLEEPING, 1)
    while _read(words, OPEN) != 0:
        sleeping = _read(words, SLEEPING)
        if sleeping == 0:
            break
        if _replace(words, SLEEPING, sleeping, sleeping - 1):
            return
    _sem_wait(words, SEMAPHORE)
