"""How was a training step written in 2018? `Step` and its standard kinds, for a `Monitor` to drive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax._run.steps import MultiStepContext
from replicax._variables import gradients, overlay
from replicax._variables.variable import Variable
from replicax.compat.tower._input import InputIterator
from replicax.compat.tower._strategy import DistributionStrategy
from replicax.optim import Optimizer

if TYPE_CHECKING:
    import optax


class Step:
    """One step of a training algorithm, as an object that is called again and again. Subclasses fill in `__call__`."""

    def __init__(self, distribution: DistributionStrategy) -> None:
        self._distribution = distribution

    @property
    def distribution(self) -> DistributionStrategy:
        """The strategy that the step runs on."""
        return self._distribution

    def initialize(self) -> list[Any]:
        """Does what has to happen before the first step; returns what is left to be done, which is nothing."""
        return []

    def __call__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.__call__() says what one step does.")


class StandardInputStep(Step):
    """A step that takes its data from a dataset, each tower a batch. Subclass it and fill in `__call__`."""

    def __init__(self, dataset_fn: Callable[[], Any], distribution: DistributionStrategy) -> None:
        super().__init__(distribution)
        self._iterator: InputIterator = distribution.distribute_dataset(dataset_fn).make_one_shot_iterator()

    def initialize(self) -> list[Any]:
        """Starts the data again from the beginning."""
        self._iterator.initialize()
        return super().initialize()


class StandardSingleLossStep(StandardInputStep):
    """A step that differentiates one loss and applies an optimizer, `iterations_per_step` times per call.

    Args:
      dataset_fn: Returns the dataset.
      loss_fn: ``loss_fn(context, *inputs)`` returns the scalar loss of one tower. The gradients are taken with respect
        to all trainable variables that it reads.
      optimizer: An `rx.Optimizer`, or an Optax transformation, for which gradients are summed over towers as they were
        in 2018: a loss that is a mean over a tower's batch then trains faster with more towers.
      distribution: The strategy.
      iterations_per_step: How many batches one call goes through, in one program.

    >>> import jax, numpy as np, optax, replicax as rx
    >>> from replicax.compat import tower
    >>> distribution = tower.MirroredStrategy(devices=jax.devices()[:2])
    >>> with distribution.scope():
    ...     w = rx.Variable(2.0)
    >>> def loss_fn(context, x):
    ...     return ((w.value * x - 3 * x) ** 2).mean()
    >>> dataset_fn = lambda: [np.ones(4, np.float32)] * 20
    >>> step = tower.StandardSingleLossStep(dataset_fn, loss_fn, optax.sgd(0.1), distribution, iterations_per_step=5)
    >>> tower.Monitor(step).run_steps(2)
    2
    >>> bool(abs(w.numpy() - 3) < 0.01)
    True
    """

    def __init__(
        self,
        dataset_fn: Callable[[], Any],
        loss_fn: Callable[..., Any],
        optimizer: Optimizer | optax.GradientTransformation,
        distribution: DistributionStrategy,
        iterations_per_step: int = 1,
    ) -> None:
        super().__init__(dataset_fn, distribution)
        self._loss_fn = loss_fn
        self._optimizer = optimizer if isinstance(optimizer, Optimizer) else Optimizer(optimizer, gradients="sum")
        self._iterations = iterations_per_step
        self._variables: list[Variable] = []

        def step(context: MultiStepContext, *inputs: Any) -> None:
            distribution.call_for_each_tower(lambda *inputs: self._train(context, inputs), *inputs)

        self._step = step  # one function object, so that its program is found again

    def __call__(self) -> None:
        """Goes through the next batches; `rx.OutOfRangeError` when the data has come to its end."""
        with self.distribution.scope():
            if not self._variables:
                self._variables = self._trainable()
            context = self.distribution.run_steps_on_dataset(self._step, self._iterator, self._iterations)
        return context.run_op

    def _train(self, context: MultiStepContext, inputs: tuple[Any, ...]) -> None:
        """One tower's part in one iteration."""
        later = _Later()

        def loss() -> tuple[Any, dict[str, Any]]:
            return self._loss_fn(later, *inputs), later.last_step_outputs

        grads, outputs = gradients.grad(loss, self._variables, has_aux=True)()
        self._optimizer.apply_gradients(zip(grads, self._variables, strict=True))
        for name, output in outputs.items():
            context.set_last_step_output(name, output, later.ops[name])
        for name, output in later.non_tensor_outputs.items():
            context.set_non_tensor_output(name, output)

    def _trainable(self) -> list[Variable]:
        """The trainable variables that the loss reads, found by tracing it without carrying it out."""
        element = self._iterator.element_spec
        inputs = element if isinstance(element, tuple) else (element,)
        with overlay.watching() as asked:
            self.distribution._engine.lower(lambda *inputs: self._loss_fn(_Later(), *inputs), inputs)
        return [variable for variable in asked if variable.trainable]


class _Later(MultiStepContext):
    """Keeps what a loss sets until it has been differentiated; towers do not meet inside that."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, Any] = {}

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None, *, aggregation: Any = None) -> None:
        self.last_step_outputs[name] = output
        self.ops[name] = reduce_op if reduce_op is not None else aggregation

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        self.non_tensor_outputs[name] = output
