"""The contexts of a sandbox: variables and working directories of their own, in its one interpreter.

Theory of operation. One context is current: its variables are the globals of the interpreter. Before code of another
context runs, an execution moves the globals into a dict of the interpreter and puts those of the other context in their
place. So code of every context is an ordinary execution of the session, with its checks, limits and audit, and
a sandbox with one context pays nothing. Contexts share everything else: imported modules, threads, the
environment, and the interpreter's end. They run one at a time.

The interpreter is agent code and may damage this dict. That damages the variables of its own sandbox and nothing else.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from executor_api.limits import PATH_BYTES_MAX
from executor_client.aio_session import AsyncSession
from executor_client.errors import EvaluationError
from executor_client.results import ExecutionResult, Outcome, VariablesState
from executor_server.gateway.e2b.errors import not_offered, sandbox_gone
from executor_server.gateway.e2b.paths import HOME
from executor_server.gateway.errors import Refusal

DEFAULT = "default"
"""The id of the context that every sandbox has."""
CONTEXTS_MAX = 32

_ID = re.compile(r"[0-9a-f]{32}")
_NO_DIRECTORY = ("FileNotFoundError", "NotADirectoryError", "PermissionError")
# Prefixes of names that all contexts share.
_SHARED = ("__", "_e2b_")

_SWITCH = f"""
def _e2b_switch(to, cwd):
    names, os = globals(), get_ipython().os
    here, kept = names.get("_e2b_contexts") or ({DEFAULT!r}, {{}})
    if to == here:
        return
    left = os.getcwd(), {{name: names[name] for name in [*names] if not name.startswith({_SHARED!r})}}
    cwd, entered = kept.get(to) or (cwd, {{}})
    os.chdir(cwd)
    for name in left[1]:
        del names[name]
    names.update(entered)
    kept.pop(to, None)
    kept[here] = left
    names["_e2b_contexts"] = to, kept
_e2b_switch(%r, %r)
del _e2b_switch
"""
_CLEAR = f"""[
    *(globals().pop(name) for name in [*globals()] if not name.startswith({_SHARED!r})), get_ipython().os.chdir(%r)
] and None"""
_FORGET = "globals().get('_e2b_contexts', (0, {}))[1].pop(%r, None) and None"
# Shells show PWD in place of the workspace's own name.
_KNOWN = f"""(lambda env, here, kept: (
    env.update(PWD={HOME!r}), [here, {{name: cwd for name, (cwd, _) in kept.items()}}]
)[1])(get_ipython().os.environ, *globals().get("_e2b_contexts", ({DEFAULT!r}, {{}})))"""
_RESTART = "get_ipython().os._exit(0)"
# Sets variables of the environment and returns their earlier values, to set them again.
_SET_ENV = """(lambda env, new: (
    {name: env.get(name) for name in new},
    [env.pop(name, None) for name, value in new.items() if value is None],
    env.update({name: value for name, value in new.items() if value is not None}),
)[0])(get_ipython().os.environ, %r)"""


@dataclass
class Context:
    context_id: str
    cwd: str = HOME
    executions: int = 0

    def described(self) -> dict[str, str]:
        """Returns it in E2B's form."""
        return {"id": self.context_id, "language": "python", "cwd": self.cwd}


class Contexts:
    """The contexts of one session. A caller holds `lock` while it enters a context and runs code in it."""

    def __init__(self, session: AsyncSession) -> None:
        self.lock = asyncio.Lock()
        self.running: str | None = None
        """The context whose code runs."""
        self.waiting = 0
        """Executions that run or wait."""
        self.session = session
        # Environment variables that a call replaced, with their earlier values, and the interpreter that has them.
        self._earlier_env: Mapping[str, str | None] = {}
        self._env_generation = 0
        self._known = {DEFAULT: Context(DEFAULT)}
        self._current = DEFAULT
        self._generation: int | None = None

    def find(self, context_id: str) -> Context:
        """Raises Refusal (404)."""
        context = self._known.get(context_id)
        if context is None:
            raise Refusal(404, f"Context {context_id[:64]} not found")
        return context

    def listed(self) -> list[dict[str, str]]:
        return [each.described() for each in self._known.values()]

    async def learned(self) -> None:
        """Finds the contexts of an earlier gateway, if that was not done yet. The caller does not hold `lock`."""
        if self._generation is None:
            async with self.lock:
                await self.learn()

    async def learn(self) -> None:
        """Finds the current context of a new interpreter; in the first one, also the contexts of an earlier gateway."""
        if self._generation == self.session.generation:
            return
        try:
            found = await self.session.evaluate(_KNOWN)
        except EvaluationError:  # the policy lets no code switch contexts
            found = None
        self._current = DEFAULT
        match found:  # by agent code
            case [str(current), {**kept}] if self._generation is None and len(kept) < CONTEXTS_MAX:
                for context_id, cwd in {current: HOME, **kept}.items():
                    if isinstance(context_id, str) and isinstance(cwd, str) and _ID.fullmatch(context_id):
                        self._known[context_id] = Context(context_id, cwd[:PATH_BYTES_MAX])
                self._current = current if current in self._known else DEFAULT
        self._generation = self.session.generation

    async def create(self, cwd: str) -> Context:
        """Makes a context and enters it. Raises Refusal."""
        if len(self._known) >= CONTEXTS_MAX:
            raise Refusal(429, f"a sandbox has at most {CONTEXTS_MAX} contexts: remove one first")
        context = Context(uuid.uuid4().hex, cwd)
        self._known[context.context_id] = context
        try:
            async with self.lock:
                await self.enter(context)
        except BaseException:
            self._known.pop(context.context_id, None)
            raise
        return context

    async def enter(self, context: Context) -> None:
        """Makes a context the current one. Raises Refusal."""
        await self.learn()
        if context.context_id == self._current:
            return
        before, self._current = self._current, ""  # unknown, if this task is cancelled
        result = await self.session.execute(_SWITCH % (context.context_id, context.cwd))
        self._current = context.context_id if result.succeeded else before
        if not result.succeeded:
            raise _not_entered(context, result)

    async def set_env(self, env: Mapping[str, str | None]) -> None:
        """Sets variables of the environment until `restore_env`. Raises Refusal."""
        try:
            earlier = await self.session.evaluate(_SET_ENV % dict(env))
        except EvaluationError as error:
            raise Refusal(403, f"env_vars could not be set: {error.message}") from error
        if isinstance(earlier, dict):  # it comes from agent code
            self._env_generation = self.session.generation
            self._earlier_env = {name: value for name in env if isinstance(value := earlier.get(name), str | None)}

    async def restore_env(self) -> None:
        """Restores the environment after a call, and before the next one if that call was cancelled."""
        earlier, self._earlier_env = self._earlier_env, {}
        if earlier and self._env_generation == self.session.generation:
            await self.set_env(earlier)
            self._earlier_env = {}

    async def remove(self, context: Context) -> None:
        """Removes a context and its variables. Raises Refusal."""
        if context.context_id == DEFAULT:
            raise Refusal(400, "the default context can't be removed; restart it to clear its variables")
        await self._stop(context)
        async with self.lock:
            if self._current in (context.context_id, ""):
                await self.enter(self.find(DEFAULT))
            await self.session.evaluate(_FORGET % context.context_id)
            self._known.pop(context.context_id, None)

    async def restart(self, context: Context) -> None:
        """Removes the variables of a context; if it is the only one, by a new interpreter. Raises Refusal."""
        await self._stop(context)
        async with self.lock:
            if len(self._known) == 1:
                result = await self.session.execute(_RESTART)
                if result.outcome is not Outcome.EXITED:
                    raise _not_entered(context, result)
            else:
                await self.enter(context)
                await self.session.evaluate(_CLEAR % context.cwd)
            context.executions = 0

    async def _stop(self, context: Context) -> None:
        if self.running == context.context_id:
            await self.session.cancel()


def _not_entered(context: Context, result: ExecutionResult) -> Refusal:
    if result.state is VariablesState.LOST:
        return sandbox_gone()
    error = result.error
    why = f"{error.type}: {error.message}" if error is not None else result.outcome.name
    if error is not None and error.type in _NO_DIRECTORY:
        return Refusal(400, f"the working directory {context.cwd!r} of the context can't be used: {why}")
    if result.outcome in (Outcome.IMPORT_DENIED, Outcome.POLICY_DENIED):
        return not_offered("a further context or a restart", f"the policy refuses the code that does it ({why})")
    return Refusal(500, f"the context could not be entered: {why}")
