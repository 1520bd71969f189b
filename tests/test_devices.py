"""A device string means one device, or is refused with a list of those that there are."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._devices import DeviceString, canonical, local_devices_default, resolve, resolve_all
from replicax._errors import DeviceError, DeviceSpecError
from tests.fresh import python

FIRST_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.mark.parametrize(
    ("word", "index"),
    [
        ("", 0),
        ("/cpu:0", 0),
        ("/CPU:0", 0),
        ("cpu:1", 1),
        ("CPU", 0),
        ("/device:CPU:1", 1),
        ("device:CPU:7", 7),
        ("/device:CPU:*", 0),
        ("/device:CPU", 0),
        ("/task:0/device:CPU:2", 2),
        ("/replica:0/task:0/device:CPU:0", 0),
        ("/job:localhost/replica:0/task:0/device:CPU:0", 0),
        ("/job:worker/task:0/cpu:3", 3),
        ("/job:tpu_worker/task:0/device:CPU:3", 3),
    ],
)
def test_a_word_means_the_device_with_that_index(word, index):
    assert resolve(word) is jax.devices("cpu")[index]


def test_a_device_means_itself():
    assert resolve(jax.devices()[3]) is jax.devices()[3]


@pytest.mark.parametrize("word", ["", "/cpu:0", "/CPU:0", "/device:CPU:0", "/task:0", FIRST_CPU])
def test_all_spellings_of_the_first_cpu_are_one(word):
    assert canonical(word) == FIRST_CPU


def test_the_canonical_spelling_of_a_device_means_that_device():
    assert [resolve(canonical(device)) for device in jax.devices()] == jax.devices()


def test_a_device_need_not_exist_to_have_a_canonical_spelling():
    assert canonical("/job:ps/task:3/gpu:1") == "/job:ps/replica:0/task:3/device:GPU:1"


def test_the_long_form_takes_upper_case_only():
    with pytest.raises(DeviceSpecError, match=r"write '/job:worker/device:CPU:0'") as refused:
        resolve("/job:worker/device:cpu:0")

    assert isinstance(refused.value, AssertionError)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    "word", ["cpu:x", "/device:CPU:0:1", "/foo:1", "cpu0", "/cpu:0/gpu:0", "/replica:one", "/job:", "npu:0", "cpu:-1"]
)
def test_what_is_no_device_string_is_refused(word):
    with pytest.raises(DeviceError, match="is not a device string"):
        resolve(word)


@pytest.mark.parametrize("word", [0, None, ["cpu:0"]])
def test_other_objects_are_refused(word):
    with pytest.raises(DeviceError, match="neither a device string"):
        resolve(word)


def test_a_cpu_too_many_is_refused_with_the_way_to_get_more():
    with pytest.raises(DeviceError) as refused:
        resolve("cpu:8")

    assert f"CPU: {FIRST_CPU} to {FIRST_CPU[:-1]}7" in str(refused.value)
    assert "`rx.host.configure(cpu_devices=9)`" in str(refused.value)


@pytest.mark.parametrize("word", ["GPU:0", "TPU:0", "/device:XLA_CPU:0"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(word):
    with pytest.raises(DeviceError, match="names a device that process 0 does not have") as refused:
        resolve(word)

    assert FIRST_CPU in str(refused.value)
    assert "configure" not in str(refused.value)


@pytest.mark.parametrize("word", ["/job:ps/task:0/cpu:0", "/job:worker/task:1/cpu:0", "/task:2/cpu:0"])
def test_a_task_outside_of_the_job_is_refused(word):
    with pytest.raises(DeviceError, match="not among the 1 processes"):
        resolve(word)


def test_a_list_keeps_its_order():
    devices = jax.devices("cpu")

    assert resolve_all(["cpu:2", devices[0], "/device:CPU:1"], "`f()`") == (devices[2], devices[0], devices[1])


def test_a_list_that_names_a_device_twice_is_refused():
    with pytest.raises(AssertionError, match=r"`rx.MirroredStrategy\(\)` names a device more than once") as refused:
        resolve_all(["cpu:0", "cpu:1", "/device:CPU:0"], "`rx.MirroredStrategy()`")

    assert f"{FIRST_CPU}: 'cpu:0', '/device:CPU:0'" in str(refused.value)


@pytest.mark.parametrize("alone", ["cpu:1", jax.devices("cpu")[1], 5], ids=["word", "device", "number"])
def test_one_device_is_no_list(alone):
    with pytest.raises(DeviceError, match=r"(?s)`f\(\)` takes a list of devices.*(CPU:1|cpu:1|jax\.devices\(\)\[:5\])"):
        resolve_all(alone, "`f()`")


def test_a_strategy_takes_all_devices_of_the_process_by_default():
    assert local_devices_default() == tuple(jax.local_devices())


def test_devices_asked_for_after_the_import_are_found_with_their_threads():
    program = """
    import jax
    from replicax import _host
    from replicax._devices import local_devices_default
    _host.tune_at_import()
    jax.config.update("jax_num_cpu_devices", 4)
    devices = local_devices_default()
    _host.require_threads(devices)
    print(len(devices))
    """
    assert python(program) == "4"


PARTS = st.fixed_dictionaries(
    {
        "job": st.none() | st.from_regex(r"[a-zA-Z][a-z_0-9]*", fullmatch=True),
        "replica": st.none() | st.integers(0, 99),
        "task": st.none() | st.integers(0, 99),
    }
)
DEVICE = st.none() | st.tuples(st.sampled_from(["CPU", "GPU", "TPU", "TPU_SYSTEM"]), st.none() | st.integers(0, 99))


@given(PARTS, DEVICE)
def test_what_is_written_is_read_back(parts, device):
    kind, index = device or (None, None)
    string = DeviceString(**parts, type=kind, index=index)

    assert DeviceString.parse(str(string)) == string


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused_with_a_device_error(text):
    try:
        DeviceString.parse(text)
    except DeviceError as error:
        assert repr(text) in str(error)
