"""Engines of several ranks through LLM: the tokens of one rank, a clear error when a rank ends, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
import torch
from children import gone, wait_until
from engines import TOKENS_PER_BLOCK, free_running, prompt_of, quiet
from trtllm_workshop.reference import ranks
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, KvCacheConfig, PluginConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.convert_plan import Sharding
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.rank_processes import RankError, RankProcesses, start_limit_s
from trtllm_workshop.reference.ranks import start_ranks
from trtllm_workshop.reference.sampling_params import SamplingParams

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

PROMPTS = [prompt_of(length) for length in (3, 17, 40)]


@pytest.fixture(scope="module")
def split(engines):
    """Engine folders by family, precision, tensor and pipeline parallel size; each built once."""
    made = {}

    def engine(tp, pp, family="llama-mha", dtype="float32"):
        key = (tp, pp, family, dtype)
        if key not in made:
            place = engines.root / f"split-{family}-{dtype}-{tp}-{pp}"
            checkpoint = convert_checkpoint(
                engines.hf(family, "float32"), place / "checkpoint", dtype=dtype, sharding=Sharding(tp, pp), say=quiet
            ).folder
            plugins = PluginConfig(tokens_per_block=TOKENS_PER_BLOCK)
            config = BuildConfig(max_batch_size=8, max_seq_len=160, gather_context_logits=True, plugin_config=plugins)
            made[key] = build_engine(checkpoint, config, place / "engine", log=quiet)
        return made[key]

    return engine


def tokens(llm, count=16, prompts=PROMPTS, **options):
    outputs = llm.generate(prompts, free_running(count, detokenize=False, **options))
    return [output.outputs[0].token_ids for output in outputs]


def started_by_us():
    """Processes of ranks, and ports that this process listens on."""
    ranks = {p.pid for p in psutil.Process().children(recursive=True) if "rank_worker" in " ".join(p.cmdline())}
    ports = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    return ranks, ports


@pytest.fixture
def nothing_left():
    """No process, port or thread number of a test is left when it has ended."""
    gc.collect()
    before, threads = started_by_us(), torch.get_num_threads()
    yield
    gc.collect()
    wait_until(lambda: started_by_us() == before, 10)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [
        ("llama-mha", 2, 1),
        ("llama-tied", 3, 1),
        ("llama-mha", 4, 1),
        ("llama-gqa", 4, 1),
        ("llama-gqa", 1, 2),
        ("qwen2", 2, 2),
    ],
)
def test_same_tokens_as_one_rank(split, nothing_left, family, tp, pp):
    with LLM(split(1, 1, family), skip_tokenizer_init=True) as llm:
        wanted = tokens(llm)
    with LLM(split(tp, pp, family), skip_tokenizer_init=True) as llm:
        assert tokens(llm) == wanted
        # A pool too small for all of them, chunks and sampling are rank 0's business alone; the others see blocks and tokens.
        sampled = SamplingParams(max_tokens=5, temperature=0.9, top_k=8, seed=3, detokenize=False, ignore_eos=True)
        first, again = (llm.generate(PROMPTS[1], sampled).outputs[0].token_ids for _ in range(2))
        assert first == again and len(llm._ranks.pids) == tp * pp - 1


def test_logits_chunks_and_pauses(split, nothing_left):
    """Context logits come from the last stage; chunked prompts and a pool too small for all requests change nothing."""
    options = {"skip_tokenizer_init": True, "enable_chunked_prefill": True, "max_num_tokens": 16}
    params = free_running(12, detokenize=False, return_context_logits=True)
    results = []
    for place in ((1, 1), (1, 2), (2, 1)):
        with LLM(split(*place), kv_cache_config=KvCacheConfig(max_tokens=96), **options) as llm:
            results.append(llm.generate(PROMPTS, params))
    for other in results[1:]:
        for mine, wanted in zip(other, results[0], strict=True):
            assert mine.outputs[0].token_ids == wanted.outputs[0].token_ids
            torch.testing.assert_close(mine.context_logits, wanted.context_logits, rtol=1e-4, atol=1e-4)


def test_built_from_a_hugging_face_folder(engines, split, nothing_left):
    with LLM(split(1, 1), skip_tokenizer_init=True) as llm:
        wanted = tokens(llm, 6)
    build = BuildConfig(max_batch_size=8, max_seq_len=160)
    with LLM(engines.hf("llama-mha"), tensor_parallel_size=2, pipeline_parallel_size=2, build_config=build) as llm:
        assert tokens(llm, 6) == wanted


def test_two_engines_side_by_side(split, nothing_left):
    with LLM(split(2, 1), skip_tokenizer_init=True) as one, LLM(split(1, 2), skip_tokenizer_init=True) as other:
        assert torch.get_num_threads() == 1
        assert tokens(one, 6) == tokens(other, 6) == tokens(one, 6)
        one.shutdown()
        assert tokens(other, 6)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_killed_while_idle(split, nothing_left, victim):
    llm = LLM(split(3, 1, "llama-tied"), skip_tokenizer_init=True)
    wanted = tokens(llm, 4)
    pids = llm._ranks.pids
    os.kill(pids[victim - 1], signal.SIGKILL)
    wait_until(lambda: all(map(gone, pids)), 10)
    with pytest.raises(RankError, match=f"rank {victim} was ended by SIGKILL"):
        tokens(llm, 4)
    with pytest.raises(RankError, match=f"rank {victim} was ended by SIGKILL"):
        tokens(llm, 4)
    llm.shutdown()
    with LLM(split(3, 1, "llama-tied"), skip_tokenizer_init=True) as again:
        assert tokens(again, 4) == wanted


@pytest.mark.parametrize(("tp", "pp", "victim"), [(2, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 3)])
def test_a_rank_killed_while_it_works(split, nothing_left, tp, pp, victim):
    """Requests in the background end with the error; nobody waits for tokens that cannot come."""
    llm = LLM(split(tp, pp), skip_tokenizer_init=True)
    outputs = [llm.generate_async(prompt, free_running(110, detokenize=False), streaming=True) for prompt in PROMPTS]
    next(outputs[0])
    os.kill(llm._ranks.pids[victim - 1], signal.SIGKILL)
    for output in outputs:
        with pytest.raises(RankError, match=f"rank {victim} was ended by SIGKILL.*make a new LLM"):
            output.result()
    llm.shutdown()


def test_a_rank_that_ends_at_the_start_says_why(split, nothing_left, tmp_path):
    folder = tmp_path / "engine"
    folder.mkdir()
    for file in split(2, 1).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "rank1.engine").write_bytes(b"no engine")
    with pytest.raises(RankError, match=r"(?s)rank 1 ended with exit code 1.*Its last lines:.*rank1\.engine"):
        LLM(folder, skip_tokenizer_init=True)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_killed_at_the_start(split, nothing_left, monkeypatch, rank):
    waits = RankProcesses.wait_for

    def kill_first(self, word, until, limit_s):
        if word == "started":
            os.kill(self.pids[rank - 1], signal.SIGKILL)
        waits(self, word, until, limit_s)

    monkeypatch.setattr(RankProcesses, "wait_for", kill_first)
    with pytest.raises(RankError, match=f"rank {rank} was ended by SIGKILL"):
        LLM(split(3, 1, "llama-tied"), skip_tokenizer_init=True)


def test_a_rank_that_never_comes_up(split, nothing_left, monkeypatch):
    start = RankProcesses._start

    def stopped(self, *details):
        start(self, *details)
        os.kill(self.pids[-1], signal.SIGSTOP)

    monkeypatch.setattr(RankProcesses, "_start", stopped)
    with pytest.raises(
        RankError, match=r"rank 1 did not come up within 0\.5 s .rank 1 said last: nothing.*RANK_START_S"
    ):
        start_ranks(split(2, 1), limit_s=0.5)


def test_the_limit_is_a_setting(monkeypatch):
    monkeypatch.setenv("TRTLLM_WORKSHOP_RANK_START_S", "7.5")
    assert start_limit_s() == 7.5
    monkeypatch.setenv("TRTLLM_WORKSHOP_RANK_START_S", "soon")
    with pytest.raises(ValueError, match="RANK_START_S='soon' is no number of seconds"):
        start_limit_s()


def test_an_llm_that_is_forgotten_ends_its_ranks(split, nothing_left):
    llm = LLM(split(2, 1), skip_tokenizer_init=True)
    (pid,) = llm._ranks.pids
    del llm
    gc.collect()
    wait_until(lambda: gone(pid), 10)


@pytest.mark.parametrize("way", ["killed", "thread", "end"])
def test_ranks_end_with_the_process_that_started_them(split, way):
    """Killed outright, killed when a thread had started them, and at the end of a program that forgot to shut down."""
    program = (
        "import sys, threading, time\n"
        "from trtllm_workshop.reference.llm import LLM\n"
        "made = []\n"
        "def make(): made.append(LLM(sys.argv[1], skip_tokenizer_init=True))\n"
        "work = threading.Thread(target=make)\n"
        "(work.start(), work.join()) if sys.argv[2] == 'thread' else make()\n"
        "print('pid', *made[0]._ranks.pids, flush=True)\n"
        "assert len(made[0].generate([5, 6, 7]).outputs[0].token_ids) > 0\n"
        "print('works', flush=True)\n"
        "sys.argv[2] == 'end' or time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", program, str(split(2, 1)), way]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            said = iter(process.stdout.readline, "")
            pid = next(int(line.split()[1]) for line in said if line.startswith("pid"))
            assert next(said) == "works\n" and (way == "end" or not gone(pid))
        finally:
            if way != "end":
                process.kill()
    wait_until(lambda: gone(pid), 10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 is not consistent with the engine's 2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not consistent with the engine's 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a whole number of ranks"),
    ],
)
def test_other_numbers_of_ranks_are_refused(split, options, said):
    with pytest.raises(ValueError, match=said):
        LLM(split(2, 1), skip_tokenizer_init=True, **options)


def test_a_step_that_takes_too_long_ends(split, nothing_left, monkeypatch):
    """A rank that is stopped, not ended: the step gives up at its limit, and the rank is ended with it."""
    monkeypatch.setattr(ranks, "REASON_LIMIT_S", 0.1)
    llm = LLM(split(2, 1), skip_tokenizer_init=True)
    (pid,) = llm._ranks.pids
    for group in (llm._ranks._communicator._tp, llm._ranks._communicator._control):
        group._set_default_timeout(timedelta(seconds=1))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankError, match="could not finish a step together"):
        tokens(llm, 4)
    assert gone(pid)
    llm.shutdown()
