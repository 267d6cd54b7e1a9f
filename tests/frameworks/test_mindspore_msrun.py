"""Jobs that msrun starts, as users do. (Most tests start ranks through a key-value store, which takes a third.)"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("script_mindspore_msrun.py")
LIMIT_S = 150


def free_ports():
    """A port that is free and so is the one where the ranks' store will be."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1000 if port < 64000 else port - 1000))
            except OSError:
                continue
            return port


def run(folder, what, ranks=2, **variables):
    """The results by rank of those ranks that gave one, and msrun's exit status."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "GLOG_v": "3",
        "MS_NODE_TIMEOUT": "20",
        **variables,
    }
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [
        str(Path(sys.executable).with_name("msrun")),
        f"--worker_num={ranks}",
        f"--local_worker_num={ranks}",
        "--master_addr=127.0.0.1",
        f"--master_port={free_ports()}",
        "--join=True",
        f"--log_dir={folder / 'logs'}",
        str(SCRIPT),
        str(folder),
        what,
    ]
    process = subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True)
    try:
        status = process.wait(LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    found = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    return found, status


def flat(value, path=""):
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, list) and any(isinstance(item, (dict, list, str)) for item in value):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{path}.{key}").items()}
    return {path: value}


def check_round_trip(found, ranks):
    assert list(range(ranks)) == sorted(found)
    for result in found.values():
        expected, actual = flat(result["alone"]), flat(result["full"])
        assert list(expected) == list(actual)
        for key, value in expected.items():
            if isinstance(value, (list, float)):
                np.testing.assert_allclose(value, actual[key], rtol=1e-5, atol=1e-6, err_msg=key)
            else:
                assert value == actual[key], key
        assert result["full"] == result["again"]
        assert found[0] == result


@pytest.mark.parametrize("what", ["initialised", "joined"])
def test_a_job_of_msrun_saves_and_loads_its_shards(tmp_path, what):
    found, status = run(tmp_path, what)
    check_round_trip(found, 2)
    assert 0 == status


def test_the_store_listens_where_a_variable_says(tmp_path):
    found, status = run(tmp_path, "initialised", HYPERSTATE_STORE_PORT=str(free_ports()))
    check_round_trip(found, 2)
    assert 0 == status


def test_a_rank_that_ends_in_the_middle_of_a_call_is_named_to_the_others(tmp_path):
    found, _ = run(tmp_path, "death", ranks=4)
    assert [0, 1, 2] == sorted(found)
    assert all("rank 3" in result["error"] for result in found.values()), found
