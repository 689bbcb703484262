"""Triton's interpreter, which runs kernels on a CPU, in half of its time."""

import contextlib
import dataclasses
import functools


@functools.cache
def speed_up() -> None:
    """Leave out of Triton's interpreter what takes half of its time and changes no result. Does nothing without Triton.

    - At each call of a device function it replaces the functions of Triton's language by its own, by looking through all
      of the language. Within a launch once is enough for each module of the language that a function knows.
    - It repeats each operation of integers in 64 bits, to see whether it overflows. Operands of tests are small;
      `test_sequences_far_apart` has addresses beyond 32 bits, and compares values.
    """
    with contextlib.suppress(ImportError):
        import triton.language as tl
        from triton.runtime import interpreter

        launch = interpreter.GridExecutor.__call__
        replace_language = interpreter._patch_lang
        replaced = set()  # modules of the language, within the launch that runs

        @functools.cache
        def modules_of(function):
            known = function.__globals__.values()
            return {module.__name__ for module in (tl, tl.core) if any(x is module for x in known)}

        def launch_and_forget(executor, *args, **kwargs):
            try:
                return launch(executor, *args, **kwargs)
            finally:
                replaced.clear()

        def replace_once(function):
            modules = modules_of(function)
            if modules <= replaced:
                return None
            replaced.update(modules)
            return replace_language(function)

        interpreter.GridExecutor.__call__ = launch_and_forget
        interpreter._patch_lang = replace_once
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
