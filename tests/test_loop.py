"""`fit` takes the steps it should, reports what they gave, and goes on where it was."""

import os
import signal
import subprocess
import sys
import textwrap

import jax
import numpy as np
import optax
import pytest

import replicax as rx
from tests.fresh import SETTINGS

STRATEGIES = {
    "one-device": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored-2": lambda: rx.MirroredStrategy(jax.devices()[:2]),
}


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES.keys())
def strategy(request):
    return request.param()


class Summing:
    """Adds up the rows it is given; the reported loss is the share of each replica in the mean of the batch."""

    def __init__(self, strategy, batches=5):
        self.strategy = strategy
        self.data = strategy.distribute_dataset([np.full(4, float(i), np.float32) for i in range(1, batches + 1)])
        with strategy.scope():
            self.total = rx.Variable(0.0, name="total", aggregation="sum")

    def step(self, x):
        self.total.assign_add(x.sum())
        return rx.mean(x)

    def fit(self, **options):
        with self.strategy.scope():
            return rx.train.fit(self.step, self.data, progress=False, **options)

    def manager(self, directory):
        checkpoint = rx.Checkpoint(total=self.total, data=self.data)
        return rx.CheckpointManager(checkpoint, directory, async_save=False)


def test_goes_through_the_data_once(strategy):
    model = Summing(strategy)

    run = model.fit()

    assert (run.step, run.ended, run.numbers) == (5, "data", {"loss": 5.0})
    assert float(model.total) == 4 * 15


def test_goes_through_the_data_as_often_as_it_takes(strategy):
    model = Summing(strategy)

    run = model.fit(steps=12)

    assert (run.step, run.ended) == (12, "steps")
    assert float(model.total) == 4 * (15 + 15 + 3)


def test_the_same_command_goes_on_where_it_was(strategy, tmp_path):
    first = Summing(strategy)
    first.fit(steps=7, manager=first.manager(tmp_path))

    again = Summing(strategy)
    run = again.fit(steps=12, manager=again.manager(tmp_path))

    assert run.step == 12
    assert float(again.total) == 4 * (15 + 15 + 3)
    assert again.fit(steps=12, manager=again.manager(tmp_path)).step == 12
    assert float(again.total) == 4 * (15 + 15 + 3)


@pytest.mark.parametrize("epoch_ends_at", [5, 10])
def test_goes_on_after_the_last_batch_of_a_pass(strategy, tmp_path, epoch_ends_at):
    first = Summing(strategy)
    first.fit(steps=epoch_ends_at, manager=first.manager(tmp_path))

    again = Summing(strategy)
    run = again.fit(steps=12, manager=again.manager(tmp_path))

    assert (run.step, float(again.total)) == (12, 4 * (15 + 15 + 3))


def test_shuffled_passes_go_on_bit_for_bit(tmp_path):
    """Each pass has an order of its own; the run is cut in the middle of one, at its end, and in the next one."""
    rows = np.random.default_rng(0).standard_normal((11, 3)).astype(np.float32)
    strategy = rx.MirroredStrategy(jax.devices()[:2])

    def trained(directory, *ends):
        for end in ends:
            data = strategy.distribute_dataset(rx.data.from_arrays(rows, batch_size=4, shuffle=5))
            with strategy.scope():
                w = rx.Variable(np.ones(3, np.float32))
                opt = rx.Optimizer(optax.adam(0.1), gradients="mean")

            def step(x, w=w, opt=opt):
                loss, gradients = rx.value_and_grad(lambda: rx.mean((x @ w.value) ** 2), [w])()
                opt.apply_gradients(zip(gradients, [w], strict=True))
                return loss

            manager = rx.CheckpointManager(rx.Checkpoint(w=w, opt=opt, data=data), directory)
            rx.train.fit(step, data, steps=end, manager=manager, progress=False)
        return w.numpy().tobytes()

    assert trained(tmp_path / "cut", 2, 3, 5, 12) == trained(tmp_path / "whole", 12)


def test_data_that_begins_anew_is_told(strategy, tmp_path):
    def manager(model):
        return rx.CheckpointManager(rx.Checkpoint(total=model.total), tmp_path)

    first, again = Summing(strategy), Summing(strategy)
    first.fit(steps=2, manager=manager(first))

    with pytest.warns(RuntimeWarning, match=r"after step 2, but its data begins anew(?s:.*)data=dataset"):
        again.fit(steps=3, manager=manager(again))
    assert float(again.total) == 4 * (1 + 2 + 1)


@pytest.mark.parametrize("of", [lambda data: data, iter], ids=["dataset", "iterator"])
def test_without_a_scope_the_strategy_of_the_dataset_is_used(of):
    model = Summing(rx.MirroredStrategy(jax.devices()[:2]))

    run = rx.train.fit(model.step, of(model.data), progress=False)

    assert (run.step, run.numbers) == (5, {"loss": 5.0})


def test_saves_every_few_steps_and_at_the_end(strategy, tmp_path):
    model = Summing(strategy)
    manager = model.manager(tmp_path)

    model.fit(manager=manager, save_every=2)

    assert manager.all_steps == [2, 4, 5]


def test_evaluates_exactly_and_reports(strategy):
    model = Summing(strategy)
    with strategy.scope():
        mean = rx.metrics.Mean()
        evaluate = rx.train.evaluation(lambda x: mean.update(x), [np.arange(4.0), np.array([9.0])], {"mean": mean})
    calls = []

    run = model.fit(evaluate=lambda: calls.append(1) or evaluate(), evaluate_every=2)

    assert run.numbers == {"loss": 5.0, "mean": 3.0}
    assert len(calls) == 3


def test_the_best_checkpoints_are_those_of_the_numbers_at_their_step(strategy, tmp_path):
    model = Summing(strategy, batches=6)
    numbers = iter([3.0, 9.0, 1.0])
    checkpoint = rx.Checkpoint(total=model.total, data=model.data)
    best = rx.CheckpointManager(checkpoint, tmp_path / "b", max_to_keep=1, keep_best=("accuracy", "max"))
    lowest = rx.CheckpointManager(checkpoint, tmp_path / "l", max_to_keep=1, keep_best=("loss", "min"))

    model.fit(manager=best, save_every=2, evaluate=lambda: {"accuracy": next(numbers)})
    assert (best.best, best.all_steps, best.metrics(6)) == (4, [4, 6], {"loss": 6.0, "accuracy": 1.0})

    model.data.set_state({})
    model.fit(manager=lowest, save_every=2)
    assert (lowest.best, lowest.metrics(2)) == (2, {"loss": 2.0})


def test_stops_when_told_to(strategy):
    model = Summing(strategy)

    run = model.fit(steps=100, report_every=1, stop=lambda numbers: numbers["loss"] >= 3)

    assert (run.step, run.ended) == (3, "stop")


def test_a_dict_of_numbers_is_reported_by_name(strategy):
    with strategy.scope():
        run = rx.train.fit(lambda x: {"a": x.sum() * 0 + 1, "b": rx.mean(x)}, [np.ones(2)] * 2, progress=False)

    assert run.numbers == {"a": 1.0, "b": 1.0}


def read_events(directory):
    """(step, tag, value) of each number in TensorBoard's file: records of a length, a digest, an event and a digest."""
    from tensorboardX.proto import event_pb2

    (file,) = directory.iterdir()
    content, at = file.read_bytes(), 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        event = event_pb2.Event.FromString(content[at + 12 : at + 12 + length])
        yield from ((event.step, value.tag, value.simple_value) for value in event.summary.value)
        at += length + 16


def test_writes_tensorboard_events(tmp_path, monkeypatch):
    model = Summing(rx.OneDeviceStrategy("cpu:0"))

    with monkeypatch.context() as environment:
        environment.setenv("CRC32C_SW_MODE", "auto")  # tensorboardX sets it when it is imported
        pytest.importorskip("tensorboardX")
        model.fit(log_dir=str(tmp_path / "log"), report_every=1)

        events = list(read_events(tmp_path / "log"))

    assert events == [(i, "loss", float(i)) for i in range(1, 6)]


def test_without_tensorboardx_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)

    with pytest.raises(NotImplementedError, match=r"pip install 'replicax\[tensorboard\]'"):
        rx.train.fit(lambda x: None, [np.ones(2)], log_dir=str(tmp_path), progress=False)


def test_a_bar_shows_progress(capsys, tmp_path):
    model = Summing(rx.OneDeviceStrategy("cpu:0"))
    numbers = dict(report_every=1, evaluate=lambda: {"accuracy": 0.5}, manager=model.manager(tmp_path))

    with model.strategy.scope():
        rx.train.fit(model.step, model.data, steps=4, progress=True, **numbers)
        first = capsys.readouterr().err
        rx.train.fit(model.step, model.data, steps=5, progress=True, **numbers)
        second = capsys.readouterr().err

    assert "4/4" in first and "steps/s" in first
    assert "loss 4  accuracy 0.5" in first
    assert "Going on after step 4." in second and "5/5" in second


def test_slow_steps_are_shown_in_seconds():
    from replicax.train._bar import _rate

    assert [_rate(speed) for speed in (None, 0.0, 0.25, 1.0, 1234.56)] == [
        "", "", "4.0 s/step", "1.0 steps/s", "1234.6 steps/s",
    ]  # fmt: skip


def test_a_generator_cannot_be_gone_through_again():
    strategy = rx.OneDeviceStrategy("cpu:0")

    with strategy.scope(), pytest.raises((ValueError, RuntimeError)):
        rx.train.fit(lambda x: None, (np.ones(2) for _ in range(3)), steps=10, progress=False)


WRONG = {
    "step=None": dict(step=None),
    "steps=-1": dict(steps=-1),
    "report_every=0": dict(report_every=0),
    "save_every=2.5": dict(save_every=2.5),
    "evaluate_every=3  has nothing to call": dict(evaluate_every=3),
    "manager='runs'": dict(manager="runs"),
    "stop=3": dict(stop=3),
    "log_dir=3": dict(log_dir=3),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_arguments_are_named_before_the_first_step(line):
    def step(x):
        raise AssertionError("a step was taken")

    with pytest.raises(ValueError, match=f"cannot work with these arguments:\n\n  {line}"):
        rx.train.fit(dataset=[np.ones(2)], progress=False, **{"step": step} | WRONG[line])


@pytest.mark.parametrize(
    ("returned", "line"),
    [
        (lambda x: x, r"loss  float32\[2\]  "),
        (lambda x: {"a": x.sum(), "b": "text"}, "b  str  could not convert"),
        (lambda x: (x.sum(), x.sum()), "loss  tuple"),
    ],
)
def test_what_cannot_be_reported_is_named(returned, line):
    with pytest.raises(ValueError, match=f"what step returned cannot be reported:\n\n  {line}"):
        rx.train.fit(returned, [np.ones(2, np.float32)], progress=False)


def test_an_evaluation_returns_numbers_by_name():
    with pytest.raises(ValueError, match="what evaluate returned cannot be reported:\n\n  float, which is no dict"):
        rx.train.fit(lambda x: None, [np.ones(2)], evaluate=lambda: 3.0, progress=False)
    with pytest.raises(ValueError, match="takes metrics by name"):
        rx.train.evaluation(lambda x: None, [np.ones(2)], [rx.metrics.Mean()])
    with pytest.raises(ValueError, match="was not given a step to call"):
        rx.train.evaluation(None, [np.ones(2)], {})


def test_an_empty_dataset_is_named():
    with pytest.raises(ValueError, match="found no batch"):
        rx.train.fit(lambda x: None, [], steps=1, progress=False)


def test_an_interrupt_ends_after_the_step_under_way_and_saves(tmp_path):
    strategy = rx.OneDeviceStrategy("cpu:0")
    model = Summing(strategy)
    manager = model.manager(tmp_path)
    before = signal.getsignal(signal.SIGINT)

    def interrupted(numbers):
        if numbers["loss"] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    run = model.fit(steps=100, manager=manager, report_every=1, stop=interrupted)

    assert run.ended == "interrupt"
    assert run.step in (3, 4)
    assert manager.all_steps == [run.step]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_is_cut_short_saves_at_once_and_does_not_evaluate(tmp_path):
    """Even where the best are kept: a checkpoint without a number is never the best."""
    model = Summing(rx.OneDeviceStrategy("cpu:0"))
    checkpoint = rx.Checkpoint(total=model.total, data=model.data)
    manager = rx.CheckpointManager(checkpoint, tmp_path, max_to_keep=1, keep_best=("accuracy", "max"))
    evaluated = []

    def evaluate():
        evaluated.append(1)
        return {"accuracy": 1.0}

    def interrupted(numbers):
        if numbers["loss"] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    run = model.fit(
        manager=manager, report_every=1, save_every=2, evaluate=evaluate, evaluate_every=2, stop=interrupted
    )

    assert run.ended == "interrupt"
    assert len(evaluated) == run.step // 2
    assert (manager.all_steps, manager.best) == ([2, run.step], 2) if run.step == 3 else ([4], 4)


def test_a_handler_of_ones_own_is_called_once_the_state_is_saved(tmp_path):
    model = Summing(rx.OneDeviceStrategy("cpu:0"))
    manager, called = model.manager(tmp_path), []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append((number, manager.all_steps)))

    try:
        run = model.fit(steps=100, manager=manager, report_every=1, stop=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)

    assert run.ended == "interrupt"
    assert called == [(signal.SIGTERM, [run.step])]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_leaves_a_program_cleanly_and_the_same_command_goes_on(tmp_path, number):
    program = textwrap.dedent(f"""
        import sys, numpy as np, replicax as rx
        w = rx.Variable(0, name="w")
        data = rx.get_strategy().distribute_dataset([np.ones(2)] * 7)
        manager = rx.CheckpointManager(rx.Checkpoint(w=w, data=data), {str(tmp_path)!r})
        def stop(numbers):
            print("step", int(numbers["step"]), flush=True)
            return False
        def step(x):
            return {{"step": w.assign_add(1)}}
        run = rx.train.fit(step, data, steps=int(sys.argv[1]), manager=manager, report_every=1, stop=stop)
        print("ended", run.ended, run.step, int(w), flush=True)
    """)
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}

    def start(steps):
        return subprocess.Popen(
            [sys.executable, "-c", program, str(steps)], env=environment, stdout=subprocess.PIPE, text=True
        )

    with start(10**9) as first:
        while first.stdout.readline() != "step 20\n":
            pass
        first.send_signal(number)
        out, _ = first.communicate(timeout=60)
    step = int(rx.train.latest_checkpoint(tmp_path).split("-")[-1])
    assert step >= 20
    if number == signal.SIGINT:  # ends the loop; the program goes on after it
        assert (first.returncode, out.splitlines()[-1]) == (0, f"ended interrupt {step} {step}")
    else:  # ends the program, which tells whoever started it that it was not done
        assert (first.returncode, "ended" in out) == (128 + signal.SIGTERM, False)

    with start(step + 5) as second:
        out, _ = second.communicate(timeout=60)
    assert out.splitlines()[0] == f"step {step + 1}"
    assert out.splitlines()[-1] == f"ended steps {step + 5} {step + 5}"
