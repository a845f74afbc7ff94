"""Tiny random models with real tokenizers on a claim, and stages that are run as a pod runs them."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dev.gate import Gate
from dev.network import free_ports
from osprey_api import progress
from osprey_api.fingerprint import sha256
from osprey_api.stages import (
    ArtifactRef,
    CaptureConfig,
    ConvertConfig,
    DataToResolve,
    DistilConfig,
    Engine,
    Execution,
    HeldOut,
    InputRole,
    Optimization,
    Outcome,
    Pinned,
    PretrainConfig,
    PromptSource,
    PruneConfig,
    RegenerateConfig,
    RegenerateResult,
    ResolveConfig,
    StageTask,
    StorageLocation,
    TextSource,
    TokenizeConfig,
    stage_fingerprint,
)
from osprey_runtime import manifest
from osprey_runtime.runner import prefix_of
from osprey_runtime.store import Content, digest_of, open_store
from osprey_trainer.__main__ import run as run_command

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("the owl", "sees", "a mouse", "in tall grass", "and waits", "until night", "comes over", "hills", "near water")


def documents(count: int, *, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (count, 40), generator=generator)
    lengths = torch.randint(5, 40, (count,), generator=generator)
    return [" ".join(WORDS[i] for i in row[:length]) + ".\n" for row, length in zip(picks, lengths, strict=True)]


def make_tokenizer(folder: Path, *, vocab_size: int, texts: list[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[2]
    ).save_pretrained(folder)


def make_model(folder: Path, *, vocab_size: int, layers: int, hidden: int, seed: int, tied: bool) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def claims(tmp_path_factory) -> Path:
    """The folder that stands for the mounted claims: two models, text and prompts."""
    root = tmp_path_factory.mktemp("claims")
    models_folder, data = root / "models", root / "data"
    make_tokenizer(models_folder / "source", vocab_size=300, texts=documents(50))
    make_model(models_folder / "source", vocab_size=304, layers=4, hidden=32, seed=1, tied=True)
    make_tokenizer(models_folder / "target", vocab_size=320, texts=documents(50)[::-1])
    make_model(models_folder / "target", vocab_size=328, layers=6, hidden=24, seed=2, tied=False)
    data.mkdir()
    (data / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(200, seed=1)))
    (data / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in documents(20, seed=2)))
    return root


OPTIMIZATION = Optimization(
    learning_rate=1e-2,
    schedule="Constant",
    warmup_ratio=0.1,
    weight_decay=0.0,
    clip_norm=1.0,
    ema_decay=0.9,
    global_batch_size=4,
    sequence_length=48,
    precision="FP32",
    seed=0,
)
SOURCE = Pinned(uri="pvc://models/source")
TARGET = Pinned(uri="pvc://models/target")
TEXT = Pinned(uri="pvc://data/text.jsonl")


@dataclass
class Machine:
    """One machine on which stages are tried: a folder as storage, and the last stage's outcome."""

    root: Path
    location: StorageLocation | None = None
    """Of its storage; None: a folder of its own."""

    @property
    def storage(self) -> StorageLocation:
        return self.location or StorageLocation(uri=f"file://{self.root}/storage")

    @property
    def log(self) -> Path:
        return self.root / "termination-log"

    def task(self, config, *, resource="ospreydrafter/owl", execution=None, **inputs: ArtifactRef) -> StageTask:
        roles = {InputRole(role): ref for role, ref in inputs.items()}
        return StageTask(
            fingerprint=stage_fingerprint(config, roles),
            namespace="nest",
            resource=resource,
            storage=self.storage,
            config=config,
            inputs=roles,
            execution=execution or Execution(),
        )

    def resolve(self, *, resource: str = "ospreybackbone/owl", **changes) -> StageTask:
        fields = {
            "model": SOURCE,
            "data": (DataToResolve(name="text", uri=TEXT.uri, kind="Text", field="text"),),
            "owner_uid": "1",
            **changes,
        }
        return self.task(ResolveConfig(**fields), resource=resource)

    def prune(self, *, source: Pinned = SOURCE, layers: int = 2) -> StageTask:
        return self.task(PruneConfig(source=source, layers=layers))

    def tokenize(self, *, tokenizer: Pinned = SOURCE, text: Pinned = TEXT, field: str = "text") -> StageTask:
        return self.task(TokenizeConfig(tokenizer=tokenizer, data=(TextSource(source=text, text_field=field),)))

    def pretrain(
        self, backbone, tokens, *, steps: int = 20, loss_vocab_size=None, freeze=False, execution=None, **optimization
    ) -> StageTask:
        config = PretrainConfig(
            steps=steps,
            loss_vocab_size=loss_vocab_size,
            freeze_embedding=freeze,
            optimization=OPTIMIZATION.model_copy(update=optimization),
        )
        return self.task(config, execution=execution, backbone=backbone, tokens=tokens)

    def convert(self, answers, *, draft_vocab_size: int | None = 100, target: Pinned = TARGET, **inputs) -> StageTask:
        config = ConvertConfig(target=target, draft_vocab_size=draft_vocab_size, seed=0)
        return self.task(config, answers=answers, **inputs)

    def capture(self, answers, *, sequence_length: int = 48, precision: str = "FP32", execution=None) -> StageTask:
        config = CaptureConfig(target=TARGET, sequence_length=sequence_length, precision=precision)
        return self.task(config, execution=execution, answers=answers)

    def distil(
        self,
        drafter,
        answers,
        *,
        states: ArtifactRef | None = None,
        epochs: int = 3,
        target: Pinned = TARGET,
        execution=None,
        **optimization,
    ) -> StageTask:
        config = DistilConfig(
            target=target,
            epochs=epochs,
            unroll=3,
            decay=0.8,
            freeze_embedding=False,
            teacher="Online" if states is None else "Captured",
            optimization=OPTIMIZATION.model_copy(update=optimization),
        )
        captured = {} if states is None else {"states": states}
        return self.task(config, execution=execution, drafter=drafter, answers=answers, **captured)

    def command(self, task: StageTask, *, scratch: str = "scratch") -> list[str]:
        path = self.root / f"{task.stage}.json"
        path.write_text(task.model_dump_json())
        return [task.stage, "--task", str(path), "--scratch", str(self.root / scratch)]

    def run(self, task: StageTask, *, scratch: str = "scratch") -> tuple[int, Outcome]:
        """In this process, as the container's main process would."""
        os.environ["OSPREY_TERMINATION_LOG"] = str(self.log)  # noqa: TID251
        self.log.unlink(missing_ok=True)
        code = run_command(self.command(task, scratch=scratch))
        return code, Outcome.model_validate_json(self.log.read_text())

    def start(
        self, task: StageTask, *, scratch: str = "scratch", stderr: IO[bytes] | None = None, **env: str
    ) -> subprocess.Popen[bytes]:
        """In a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "osprey_trainer", *self.command(task, scratch=scratch)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "OSPREY_TERMINATION_LOG": str(self.log)} | env,  # noqa: TID251
            stderr=stderr,
        )

    def done(self, task: StageTask, **options) -> Outcome:
        code, outcome = self.run(task, **options)
        assert (code, outcome.failure) == (0, None), outcome.message
        return outcome

    def files(self, ref: ArtifactRef) -> Path:
        """A finished artifact, fetched and verified."""
        return manifest.fetch(self.storage, ref, self.root / "fetched" / ref.digest[-12:])

    def released(self, folder: Path) -> ArtifactRef:
        """A folder with a model that somebody else made."""
        digest = digest_of({file.path: Content(file.size, file.sha256) for file in manifest.files_of(folder)})
        return ArtifactRef(uri=f"file://{folder}", digest=digest)

    def checkpoints(self, task: StageTask) -> list[str]:
        """Names of the complete ones, the oldest first."""
        return sorted(
            PurePath(key).parent.name for key in self.keys(task, "checkpoints") if key.endswith("/complete.json")
        )

    def keys(self, task: StageTask, folder: str) -> list[str]:
        """What is in the storage below a folder of the stage's artifact."""
        return [entry.key for entry in open_store(self.storage).list(f"{prefix_of(task)}/{folder}")]

    def answers(self, lines: list[dict], *, temperature: float = 0.0) -> ArtifactRef:
        """Publishes an answers artifact, as the regenerate stage does. Other lines get another fingerprint."""
        config = RegenerateConfig(
            target=TARGET,
            prompts=(
                PromptSource(
                    name="owls",
                    source=Pinned(uri="pvc://data/prompts.jsonl"),
                    prompt_field="prompt",
                    samples=None,
                    train=True,
                    evaluate=True,
                ),
            ),
            held_out=HeldOut(samples=1, seed=0),
            max_tokens=64,
            temperature=temperature,
            seed=0,
            engine=Engine(version=sha256(lines)),
        )
        folder = self.root / "answers"
        folder.mkdir(exist_ok=True)
        (folder / "answers-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        tokens = sum(len(line["answer_ids"]) for line in lines)
        task = self.task(config)
        published = manifest.publish(
            open_store(self.storage),
            prefix_of(task),
            "test",
            folder,
            task=task,
            result=RegenerateResult(
                prompts=len(lines), answer_tokens=tokens, cut_at_limit=0, skipped=0, tokens_per_second=1.0
            ),
        )
        return ArtifactRef(uri=task.prefix, digest=published.digest)


@pytest.fixture(scope="session")
def greedy_answers(claims) -> list[dict]:
    """What the target answers greedily to 24 prompts: lines of an answers artifact."""
    target = LlamaForCausalLM.from_pretrained(claims / "models" / "target")
    generator = torch.Generator().manual_seed(7)
    lines = []
    with torch.no_grad():
        for number in range(24):
            prompt = torch.randint(3, 320, (5 + number % 7,), generator=generator).tolist()
            answer: list[int] = []
            while len(answer) < 12 + number % 9 and 2 not in answer:
                answer.append(int(target(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
            finish = "stop" if answer[-1] == 2 else "length"
            lines.append({"domain": "owls", "prompt_ids": prompt, "answer_ids": answer, "finish": finish})
    return lines


@pytest.fixture(scope="session")
def machine_of(claims) -> Iterator[Callable[[Path], Machine]]:
    """Makes machines, each with a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSPREY_CLAIMS_ROOT", str(claims))
        patch.setenv("OSPREY_METRICS_PORT", "0")
        # Set by the command and by DeepSpeed; put back after the tests.
        for name in ("OSPREY_TASK", "OSPREY_SCRATCH", "OSPREY_TERMINATION_LOG", "LOCAL_RANK"):
            patch.setenv(name, "0")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield Machine
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def retokenized(claims) -> Pinned:
    """The target with as many tokens, but other ones, as another revision of a model may have."""
    folder = claims / "models" / "retokenized"
    shutil.copytree(claims / "models" / "target", folder)
    make_tokenizer(folder, vocab_size=320, texts=[f"zebra {n * 7919} quiz {n} jukebox" for n in range(200)])
    return Pinned(uri="pvc://models/retokenized")


@pytest.fixture
def machine(tmp_path, machine_of) -> Machine:
    return machine_of(tmp_path)


class Run:
    """A stage's process, and what it said."""

    def __init__(self, machine: Machine, task: StageTask, scratch: str = "run", **env: str) -> None:
        (self.port,) = free_ports(1)
        self.machine, self.began = machine, time.monotonic()
        machine.log.unlink(missing_ok=True)
        self.log = (machine.root / "log").open("wb")
        self.process = machine.start(task, scratch=scratch, stderr=self.log, OSPREY_METRICS_PORT=str(self.port), **env)

    def at_step(self, step: int) -> None:
        """Returns when the stage has done so many steps."""
        while not self.is_at(step):
            assert self.process.poll() is None, self.said[-2000:]
            time.sleep(0.02)

    def is_at(self, step: int) -> bool:
        """Whether the stage has done so many steps."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return False
        return any(float(line.split()[1]) >= step for line in lines if line.startswith(f"{progress.STEP} "))

    @property
    def said(self) -> str:
        return Path(self.log.name).read_text()

    def end(self) -> tuple[int, Outcome, str]:
        code = self.process.wait(timeout=1800)
        self.seconds = time.monotonic() - self.began
        self.log.close()
        return code, Outcome.model_validate_json(self.machine.log.read_text()), self.said


@pytest.fixture
def running() -> Callable[..., AbstractContextManager[Run]]:
    """Runs a stage as a process, which is gone after the context."""

    @contextmanager
    def run(machine: Machine, task: StageTask, **options: str) -> Iterator[Run]:
        begun = Run(machine, task, **options)
        try:
            yield begun
        finally:
            begun.process.kill()
            begun.process.wait()
            begun.log.close()

    return run


@pytest.fixture
def gate(s3, monkeypatch) -> Iterator[Gate]:
    """A gate before the S3 server, whose keys are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with Gate(s3.endpoint) as gate:
        yield gate


@pytest.fixture
def behind_gate(machine_of, gate, s3, bucket, tmp_path) -> Callable[[str], Machine]:
    """Makes machines, each with a storage of its own, which is reached by the gate."""

    def make(name: str) -> Machine:
        (tmp_path / name).mkdir()
        location = StorageLocation(uri=f"s3://{bucket}/{name}", endpoint=gate.endpoint, region=s3.region)
        made: Machine = machine_of(tmp_path / name, location)
        return made

    return make
