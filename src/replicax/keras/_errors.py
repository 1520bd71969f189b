"""What can go wrong between Keras and a strategy, and what should the user do?"""

from __future__ import annotations

from typing import Any

from replicax._errors import ContextError, InputError, NotAvailableError, message


def made_outside(model: Any, method: str, strategy: Any) -> ContextError:
    return ContextError(
        message(
            f"model.{method}(...) inside the scope of a strategy, with a model that was made outside of it",
            [f"{type(model).__name__} {model.name!r}", f"in force  {strategy!r}"],
            "A model's variables are laid over the devices when they are made, so the strategy has to be known by then.",
            ["make it inside: `with strategy.scope(): model = ...`", f"call `{method}` outside the scope: one device"],
        )
    )


def other_backend(model: Any, backend: str) -> NotAvailableError:
    return NotAvailableError(
        message(
            "A Keras model under strategy.scope() needs Keras's JAX backend",
            [f"{type(model).__name__}  backend {backend!r}"],
            "The strategies lay out JAX arrays.",
            [
                '`os.environ["KERAS_BACKEND"] = "jax"` before the first `import keras`',
                "make the model outside the scope",
            ],
        )
    )


def several_processes(model: Any, strategy: Any) -> NotAvailableError:
    here = len(strategy.placement.local_replicas)
    return NotAvailableError(
        message(
            "A Keras model cannot yet be made under a strategy of several processes",
            [f"{type(model).__name__}  {strategy.num_replicas_in_sync} replicas, {here} of them in this process"],
            "`fit` reads its batches in one process.",
            [
                "use a strategy of one process, `rx.MirroredStrategy()`",
                "write the step yourself with another layer library",
            ],
        )
    )


def targets_beside_dataset(dataset: Any) -> InputError:
    return InputError(
        message(
            "A replicax dataset was given to Keras together with `y` or `sample_weight`",
            [f"x  {type(dataset).__name__}"],
            "Its batches bring their own targets and weights, as tuples.",
            ["put them in the dataset: `rx.data.from_arrays((x, y, sample_weight), batch_size)`"],
        )
    )


def lies_elsewhere(model: Any, variable: Any, strategy: Any) -> ContextError:
    return ContextError(
        message(
            f"The {type(model).__name__} {model.name!r} holds a variable that lies on the devices of another strategy",
            [f"{variable.path}  {variable._layout}", f"model   {strategy!r}"],
            "One program computes with all variables of a model, on one set of devices.",
            [
                "make the layer and the model under the same `strategy.scope()`",
                "make the layer anew and copy its values: `layer.set_weights(other.get_weights())`",
            ],
        )
    )


def adopted_in_central_storage(model: Any, variable: Any) -> NotAvailableError:
    return NotAvailableError(
        message(
            f"Keras's own loops cannot use the {type(model).__name__} {model.name!r}, adopted under central storage",
            [variable.path],
            "An adopted variable stays on the parameter device, and `fit` and its relatives compute where variables are.",
            [
                "train it in steps of your own only: `strategy.run(step, ...)`",
                "do not adopt it: `fit`, `evaluate` and `predict` work under central storage",
            ],
        )
    )


def not_adopted(owner: Any, variables: list[Any]) -> ContextError:
    return ContextError(
        message(
            f"A Keras {type(owner).__name__} that was not adopted is used or made inside a step",
            [variable.path for variable in variables[:5]],
            "A step would take the present values for constants, and what it assigns would be lost.",
            [
                "adopt it before the step: `with strategy.scope(): weights = rx.keras.adopt(model)`",
                "let `model.fit(...)` do the training",
            ],
        )
    )


def not_adoptable(owner: Any, variable: Any) -> NotAvailableError:
    return NotAvailableError(
        message(
            f"rx.keras.adopt({type(owner).__name__}) found a variable that it cannot adopt",
            [f"{variable.path}  {type(variable).__module__}.{type(variable).__name__}"],
            "Only plain variables of Keras's JAX backend can be kept in an `rx.Variable`.",
            ["set KERAS_BACKEND=jax before the first `import keras`", "leave KERAS_NNX_ENABLED unset"],
        )
    )
