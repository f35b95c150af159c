"""How a traced function with Variables is called: their values go in, new ones come out.

Which Variables a program reads and assigns is known when it was traced, not before. So a call
takes the program that fitted last time; where JAX has to trace, and what the function does with
Variables turns out to be something else, tracing stops, and the call goes on with another program.
A function that never uses Variables has nothing to do with this module.

A program that assigns a Variable which it also reads writes the new value over the old one, at
top level, where nobody else can have the old array; see `variable.lend`. One that calls the host
(`Graph.calls_host`) does not: what runs there may read the Variable, or raise, and by then the old
value would be gone and the new one never come. Such a program keeps the old value until it is
over, and is waited for: it may fail long after it was started, and a value that it never computed
is not assigned.
"""

from __future__ import annotations

import inspect
import itertools
import keyword
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.lowering import Lowering, evaluate
from tracegrad.tracing.static import StaticArguments, resolve
from tracegrad.variables.lending import hold, lend, peek, settle, show, take_back
from tracegrad.variables.listening import listened
from tracegrad.variables.overriding import ForwardingTrace
from tracegrad.variables.variable import Variable

if TYPE_CHECKING:
    from tracegrad.tracing.traced import Pipeline

T = TypeVar("T")

_KEPT_PROGRAMS = 64
_KEPT_SIGNATURES = 1024
_ATTEMPTS = 8


class VariablesFound(BaseException):
    """A function that is being traced uses other Variables than its program was made for.

    Carries the graph that came out. Passes through the ``except Exception`` of users' functions.
    """

    def __init__(self, pipeline: Pipeline, graph: Graph):
        super().__init__("nothing catches this but tracegrad")
        self.pipeline = pipeline
        self.graph = graph


class JitDisabled(Exception):
    """A program is called under `jax.disable_jit`, where JAX hands it values.

    So that no warm call has to ask. It is raised before the user's function is called.
    """


class _Calls(threading.local):
    expecting: tuple[Pipeline, ...] = ()  # whose Variables somebody up the stack waits for
    known: tuple[Pipeline, Graph] | None = None  # the graph of the call that goes on now


_calls = _Calls()


def is_expected(pipeline: Pipeline) -> bool:
    """Whether somebody up the stack catches `VariablesFound` for a pipeline."""
    return any(pipeline is other for other in _calls.expecting)


class Expecting:
    """A block that a function with other Variables than expected leaves, and leaves quietly; then
    `found` is set. Not a function that is called, for the sake of the user's tracebacks."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.found: VariablesFound | None = None

    def __enter__(self) -> Expecting:
        self._before = _calls.expecting
        _calls.expecting = (*self._before, self.pipeline)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        _calls.expecting = self._before
        if isinstance(error, VariablesFound) and error.pipeline is self.pipeline:
            self.found = error.with_traceback(None)  # which would hold who holds the error
            return True
        return False


@contextmanager
def going_on_with(pipeline: Pipeline, graph: Graph | None) -> Iterator[None]:
    """A call whose graph is known: it is not traced again."""
    before = _calls.known
    _calls.known = None if graph is None else (pipeline, graph)
    try:
        yield
    finally:
        _calls.known = before


def _claimed(pipeline: Pipeline, tree: Any, flat: Sequence[Any]) -> Graph | None:
    """The graph of the call that goes on now, if it is of these arguments; for one use."""
    if _calls.known is None or _calls.known[0] is not pipeline:
        return None
    graph = _calls.known[1]
    _calls.known = None
    given = [jax.typeof(value) for value in flat]
    fits = graph.in_tree == tree and graph.in_avals[: len(given)] == given
    return graph if fits else None


# ---------------------------------------------------------------------------------------- program


class Roles:
    """The Variables of a program, held weakly: those that it reads and assigns, only reads, only
    assigns."""

    def __init__(self, graph: Graph):
        read = {id(v): v for v in graph.variables}
        assigned = {id(v): v for v in graph.assigned}
        self.is_over = False  # a Variable is gone, and with it the use of the program
        self.updated = self._refs(v for key, v in assigned.items() if key in read)
        self.read = self._refs(v for key, v in read.items() if key not in assigned)
        self.written = self._refs(v for key, v in assigned.items() if key not in read)
        self.calls_host = graph.calls_host
        self.identity = identity_of(graph)

    def _refs(self, variables: Iterator[Variable]) -> list[weakref.ref[Variable]]:
        me = weakref.ref(self)

        def over(_: object) -> None:
            roles = me()
            if roles is not None:
                roles.is_over = True

        return [weakref.ref(variable, over) for variable in variables]


def identity_of(graph: Graph) -> tuple[frozenset[int], frozenset[int], bool]:
    """By which two graphs that use the same Variables in the same way are told to do so."""
    variables, assigned = graph.variables, graph.assigned
    return frozenset(map(id, variables)), frozenset(map(id, assigned)), graph.calls_host


class Body:
    """What `jax.jit` sees of a function with Variables: a function of their values.

    Returns the new values, of those updated and those only written, and the function's result.
    """

    def __init__(self, pipeline: Pipeline, roles: Roles):
        self.pipeline = pipeline
        self.roles = roles
        self.__name__ = self.__qualname__ = pipeline.__name__
        self.__doc__ = pipeline.__doc__
        self.__module__ = pipeline.__module__
        signature = _with_values_in_front(pipeline.__wrapped__, [*roles.updated, *roles.read])
        if signature is not None:  # argument names, and checks of static ones
            self.__signature__ = signature

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.pipeline.__wrapped__

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        if _jax.config.jax_disable_jit:
            raise JitDisabled
        pipeline, roles = self.pipeline, self.roles
        places = [id(ref()) for ref in (*roles.updated, *roles.read)]
        values = dict(zip(places, args))
        args, kwargs = pipeline.given_before(args[len(places) :], kwargs)
        flat, tree = pipeline.flatten(args, kwargs)
        graph = _claimed(pipeline, tree, flat) or pipeline.traced(args, kwargs)
        if identity_of(graph) != roles.identity:
            raise VariablesFound(pipeline, graph)
        flat += [values[id(variable)] for variable in graph.variables]
        outs = evaluate(graph, flat, Lowering())
        count = len(outs) - len(graph.assigned)
        new = dict(zip(map(id, graph.assigned), outs[count:], strict=True))
        ordered = [new[id(ref())] for ref in (*roles.updated, *roles.written)]
        return ordered, jax.tree.unflatten(graph.out_tree, outs[:count])

    def __repr__(self) -> str:
        return repr(self.pipeline)


def _with_values_in_front(
    fun: Callable[..., Any], variables: Sequence[weakref.ref[Variable]]
) -> inspect.Signature | None:
    """The signature of a function with a parameter for each Variable in front, of its name."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return None
    taken = set(signature.parameters)
    front = []
    for ref in variables:
        base = name = re.sub(r"\W", "_", getattr(ref(), "name", "")) or "_"
        for number in itertools.count(1):
            if name.isidentifier() and not keyword.iskeyword(name) and name not in taken:
                break
            name = f"{base}_{number}" if base.isidentifier() else f"_{base}_{number}"
        taken.add(name)
        front.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY))
    own = list(signature.parameters.values())
    return signature.replace(parameters=[*front, *own])


class Program:
    """A function with Variables, compiled for one way in which it uses them."""

    def __init__(self, pipeline: Pipeline, graph: Graph, options: dict[str, Any]):
        self.pipeline = pipeline
        self.roles = Roles(graph)
        self.body = Body(pipeline, self.roles)
        updated, read, _ = self.variables()
        count = len(updated) + len(read)
        options = self._with_shardings(_behind_values(pipeline, options, count))
        self.nested = jax.jit(self.body, **options)
        self._has_options = any(options.values())
        self._forms: dict[Any, Any] = {}  # of a trace that calls it directly
        extra = _jax.keep_recompute_options(jax.default_backend())
        if extra is not None and pipeline.recomputes:
            options = _jax.with_compiler_options(options, extra)
        written_over = () if self.roles.calls_host else range(len(updated))
        donated = (*written_over, *options.pop("donate_argnums"))
        self.outermost = jax.jit(self.body, **options, donate_argnums=donated)
        # Where it writes over the old values: at top level, and nowhere if it calls the host.
        self._writes_over_in = None if self.roles.calls_host else _jax.TopLevelTrace

    def _with_shardings(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with shardings for the values too, where the user gave some."""
        given = options.get("in_shardings")
        if given is not None:
            updated, read, _ = self.variables()
            stored = peek([*updated, *read])
            own = [value.sharding if value.committed else None for value in stored]
            options = {**options, "in_shardings": (*own, *given)}
        if options.get("out_shardings") is not None:
            options = {**options, "out_shardings": (None, options["out_shardings"])}
        return options

    def variables(self) -> tuple[list[Variable], list[Variable], list[Variable]]:
        """Those updated, only read, only written."""
        roles = self.roles
        updated, read, written = (
            [ref() for ref in roles.updated],
            [ref() for ref in roles.read],
            [ref() for ref in roles.written],
        )
        return updated, read, written  # type: ignore[return-value]  # not over: all are there

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        roles = self.roles  # and not `variables()`: a warm call is a few microseconds
        updated: Any = [ref() for ref in roles.updated] if roles.updated else ()
        read: Any = [ref() for ref in roles.read] if roles.read else ()
        written: Any = [ref() for ref in roles.written] if roles.written else ()
        if type(_jax.current_trace(None)) is not self._writes_over_in or listened():
            is_alone = _jax.is_top_level()
            call = self._held if is_alone and not listened() else self._watched
            return call(updated, read, written, args, kwargs)
        constants = peek(read) if read else ()
        values = lend(updated)
        try:
            new, result = self.outermost(*values, *constants, *args, **kwargs)
        except BaseException:
            take_back(updated)
            raise
        settle([*updated, *written] if written else updated, new)
        return result

    def _held(
        self,
        updated: Sequence[Variable],
        read: Sequence[Variable],
        written: Sequence[Variable],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a function that calls the host, with nobody around."""
        constants = [variable.value for variable in read]  # the host may run what writes over them
        assigned = (*updated, *written)
        values = hold(assigned)[: len(updated)]
        try:
            new, result = self.outermost(*values, *constants, *args, **kwargs)
            _jax.wait_for(new)
        except BaseException:
            take_back(assigned)
            raise
        settle(assigned, new)
        return result

    def _watched(
        self,
        updated: Sequence[Variable],
        read: Sequence[Variable],
        written: Sequence[Variable],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls the function where others look on."""
        trace = _jax.current_trace(None)
        variables = (*updated, *read)
        outcome = None
        if isinstance(trace, ForwardingTrace) and not self._has_options:
            values = show(variables)
            outcome = trace.call_directly(self.nested, self._forms, (*values, *args), kwargs)
        if outcome is None:
            values = [variable.value for variable in variables]
            outcome = self.nested(*values, *args, **kwargs)
        new, result = outcome
        self._assign((*updated, *written), new)
        self.pipeline.warn_of_merging()
        return result

    def _assign(self, variables: Sequence[Variable], new: Sequence[Any]) -> None:
        if self.roles.calls_host:
            _jax.wait_for(new)
        for variable, value in zip(variables, new, strict=True):
            variable.assign(value)

    def staged(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`lower`, `trace` or `eval_shape` of the compiled function of values."""
        updated, read, _ = self.variables()
        jitted = self.nested if stage == "eval_shape" else self.outermost
        values = [variable.value for variable in (*updated, *read)]
        return getattr(jitted, stage)(*values, *args, **kwargs)


def _behind_values(pipeline: Pipeline, options: dict[str, Any], values: int) -> dict[str, Any]:
    """The user's options for a function with more arguments in front."""

    def positions(arguments: StaticArguments) -> tuple[int, ...]:
        return tuple(p + values if p >= 0 else p for p in sorted(arguments.positions))

    donated = resolve(
        pipeline.__wrapped__, options.get("donate_argnums"), options.get("donate_argnames")
    )
    moved = {
        **options,
        "static_argnums": positions(pipeline.static),
        "static_argnames": tuple(sorted(pipeline.static.names)),
        "donate_argnums": positions(donated),
        "donate_argnames": tuple(sorted(donated.names)),
    }
    shardings = options.get("in_shardings")
    if shardings is not None and not isinstance(shardings, tuple):
        count = len(inspect.signature(pipeline.__wrapped__).parameters) - len(pipeline.static.names)
        moved["in_shardings"] = (shardings,) * count
    return moved


# ------------------------------------------------------------------------------------------ calls


class StatefulCalls:
    """Calls of one function with Variables, each by the program that fits."""

    def __init__(self, pipeline: Pipeline, options: dict[str, Any]):
        self._pipeline = pipeline
        self._options = options
        self._programs: OrderedDict[Any, Program] = OrderedDict()  # by identity_of, last used last
        self._signatures: OrderedDict[Any, Program] = OrderedDict()
        self._only: Program | None = None  # the one program, while there is one
        self._lock = threading.Lock()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        program = self._only
        if program is None or program.roles.is_over:
            if _jax.config.jax_disable_jit:
                return self._pipeline.eagerly(args, kwargs)
            return self.search(args, kwargs, lambda p: p(args, kwargs))
        try:
            return program(args, kwargs)
        except VariablesFound as other:
            if other.pipeline is not self._pipeline:
                raise
            found = other.with_traceback(None)
        except JitDisabled:
            found = None
        if found is None:
            return self._pipeline.eagerly(args, kwargs)
        return self.search(args, kwargs, lambda p: p(args, kwargs), found)

    def search(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        action: Callable[[Program], T],
        found: VariablesFound | None = None,
    ) -> T:
        """Does something with the program that fits the arguments.

        Args:
          found: the graph of these arguments, where it is known.
        """
        key = self._key(args, kwargs)
        for _ in range(_ATTEMPTS):
            if found is None:
                program = self._likely(key)
                if program is None:
                    found = VariablesFound(self._pipeline, self._pipeline.traced(args, kwargs))
            if found is not None:
                program = self._program_for(found.graph)
            assert program is not None
            graph = None if found is None else found.graph
            with going_on_with(self._pipeline, graph), Expecting(self._pipeline) as expecting:
                result = action(program)
                self._remember(key, program)
                return result
            found = expecting.found
        raise RuntimeError(
            f"{self._pipeline.__name__} uses other Variables each time it is traced. Create its "
            "Variables once, outside of it."
        )

    def _likely(self, key: Any) -> Program | None:
        with self._lock:
            program = self._signatures.get(key)
            if program is None and self._programs:
                program = next(reversed(self._programs.values()))
        return None if program is None or program.roles.is_over else program

    def _program_for(self, graph: Graph) -> Program:
        identity = identity_of(graph)
        with self._lock:
            program = self._programs.get(identity)
        if program is None or program.roles.is_over:
            program = Program(self._pipeline, graph, self._options)
        with self._lock:
            for old in [k for k, p in self._programs.items() if p.roles.is_over]:
                del self._programs[old]
            for old in [k for k, p in self._signatures.items() if p.roles.is_over]:
                del self._signatures[old]
            self._programs[identity] = program
            while len(self._programs) > _KEPT_PROGRAMS:
                self._programs.popitem(last=False)
            self._only = program if len(self._programs) == 1 else None
        return program

    def _remember(self, key: Any, program: Program) -> None:
        with self._lock:
            if program.roles.identity in self._programs:
                self._programs.move_to_end(program.roles.identity)
            if key is not None:
                self._signatures[key] = program
                self._signatures.move_to_end(key)
                if len(self._signatures) > _KEPT_SIGNATURES:
                    self._signatures.popitem(last=False)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What decides which program is traced, as far as it can be said cheaply; or None."""
        static = self._pipeline.static
        flat, tree = self._pipeline.flatten(args, kwargs)
        try:
            types = tuple(jax.typeof(leaf) for leaf in flat)
            fixed = tuple(args[i] for i in static.within(args))
            key = (tree, types, fixed, tuple(sorted(static.named(kwargs).items())))
            hash(key)
        except (TypeError, ValueError):  # jit says what is wrong with it
            return None
        return key

    def clear_cache(self) -> None:
        """Forgets every program."""
        with self._lock:
            self._programs.clear()
            self._signatures.clear()
            self._only = None


# ------------------------------------------------------------------------- found after the first


class _Weakly:
    """Variables, as what a tree of JAX knows about a node."""

    def __init__(self, variables: Sequence[Variable]):
        self.refs = [weakref.ref(variable) for variable in variables]


@jax.tree_util.register_pytree_node_class
class Outcome:
    """A result with new values of Variables, which are assigned when the result is handed out.

    For the one call of a function in which Variables turn up although earlier calls had none: it
    went to jit's own callable, so that there is no other place to do it.
    """

    def __init__(self, result: Any, values: Sequence[Any], variables: Sequence[Variable]):
        self._children = (result, list(values))
        self._variables = _Weakly(variables)

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Weakly]:
        return self._children, self._variables

    @classmethod
    def tree_unflatten(cls, variables: _Weakly, children: tuple[Any, ...]) -> Any:
        result, values = children
        _jax.wait_for(values)  # a value that a failed program never computed is not one
        for ref, value in zip(variables.refs, values, strict=True):
            variable = ref()
            if variable is not None and isinstance(value, jax.Array):
                variable.assign(value)
        return result


def evaluate_once(graph: Graph, flat: Sequence[Any]) -> Any:
    """The result of a graph with Variables, inside the trace of a jit that knows none of them.

    Their values are constants of that jit's program: right for this call, and for no other.
    """
    with _jax.outside_of(_jax.current_trace(None)):
        values = [variable.value for variable in graph.variables]
    outs = evaluate(graph, [*flat, *values], Lowering())
    count = len(outs) - len(graph.assigned)
    return Outcome(jax.tree.unflatten(graph.out_tree, outs[:count]), outs[count:], graph.assigned)


def run_eagerly(graph: Graph, flat: Sequence[Any]) -> Any:
    """The result of a graph with Variables, operation by operation; assigns them."""
    values = [variable.value for variable in graph.variables]
    outs = evaluate(graph, [*flat, *values], Lowering())
    count = len(outs) - len(graph.assigned)
    for variable, value in zip(graph.assigned, outs[count:], strict=True):
        variable.assign(value)
    return jax.tree.unflatten(graph.out_tree, outs[:count])
