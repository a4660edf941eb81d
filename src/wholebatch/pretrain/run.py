"""A run, from data to report: corpus → model → micro-batch that fits → steps → what came of it."""

import dataclasses
import platform
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import loop, tokenizer
from .backend import PACKAGES, Backend, load, require
from .checkpoints import Checkpoint
from .compare import compare
from .corpus import Corpus, prepare
from .display import Screen
from .errors import DamagedError, FolderError
from .files import as_json, write_text
from .folder import Folder
from .ranks import Ranks
from .report import write_report
from .sample import continuation
from .settings import Settings
from .summary import Facts, beginning, summarise
from .tokenizer import Tokenizer
from .weights import shapes
from .writer import Writer

UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Args:
        given: the settings that were given, by name.
        out: the folder for the run's files.
        cache: a folder for tokens, shared by all runs.
        resume: continue what is in the folder.
        overwrite: replace what is in the folder.
        compare: also train the first steps unsplit, and with the textbook loop.
    """

    given: dict[str, Any]
    out: Path
    cache: Path
    resume: bool = False
    overwrite: bool = False
    compare: bool = False


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Args:
        how: the last thing that was done.
        step: the last step that was saved.
        summary: what came of it, if it was done.
        verified: how many files were.
        told: False on all ranks but the first, which tells.
    """

    how: Literal["done", "verified", "interrupted"]
    step: int
    summary: Facts
    verified: int = 0
    told: bool = True


def run(request: Request, screen: Screen) -> Ended:
    """Train from the beginning, or from where it was, to the end or until it is interrupted."""
    with Ranks(request.given.get("backend", "torch")) as ranks:
        ended = _run(request, screen if ranks.first else Screen(), ranks)
        return dataclasses.replace(ended, told=ranks.first)


def _run(request: Request, screen: Screen, ranks: Ranks) -> Ended:
    folder = Folder(request.out)
    saved = ranks.from_first(lambda: folder.open(resume=request.resume, overwrite=request.overwrite, warn=screen.warn))
    settings = Settings.of(request.given, saved.facts["settings"] if saved else None)
    require(settings.backend)
    if saved:
        _refuse_other_settings(settings, folder, saved)
        if saved.step == settings.steps and folder.is_sealed and not request.compare:
            return Ended("verified", saved.step, folder.read_summary(), folder.verify())

    screen.note("reading the text ...")
    corpus = _corpus(settings, request.cache, folder, saved, ranks)
    backend = load(settings, corpus.tokenizer.size, ranks)
    if saved:
        done, facts = saved.step, saved.facts
        backend.use(facts["micro_batch_size"])
        backend.load(saved.state())
    else:
        screen.note("finding out how much memory a step needs ...")
        done, facts = 0, _facts(settings, corpus, backend, ranks)
    facts |= {"ranks": ranks.size, "device": backend.device}
    ranks.wait()  # all have read what the first will soon replace

    screen.start(beginning(facts, done), settings.steps, done)
    if ranks.first:
        folder.prepare(anew=not saved)
    with (
        Writer(folder, backend, facts, keep=settings.keep, saved=done if saved else None)
        if ranks.first
        else nullcontext() as writer,
        loop.Interruption() as interruption,
    ):
        if writer and not saved:
            _keep_tokenizer(corpus.tokenizer, folder)
            writer.save(0)
        for record in loop.train(settings, backend, corpus, done=done, writer=writer):
            done = record["step"]
            if record["micro_batch_size"] != facts["micro_batch_size"]:
                facts["micro_batch_size"] = record["micro_batch_size"]
                screen.warn(f"memory ran out in step {done}: {facts['micro_batch_size']} rows at a time from here on")
            screen.step(record)
            if ranks.any(interruption.requested) and done < settings.steps:
                if writer:
                    writer.save(done)
                return Ended("interrupted", done, facts)
    screen.stop()
    if ranks.first:
        facts = _finish(request, screen, settings, corpus, backend, folder, facts)
    return Ended("done", done, facts)


def _corpus(settings: Settings, cache: Path, folder: Folder, saved: Checkpoint | None, ranks: Ranks) -> Corpus:
    """The first rank prepares it; the others find it in the cache."""
    if not ranks.first:
        ranks.wait()
    corpus = prepare(settings, cache, _kept_tokenizer(folder, saved) if saved else None)
    if ranks.first:
        ranks.wait()
    if saved and saved.facts["text"] != corpus.digest:
        raise FolderError(
            f"--data is not the text that the run in {folder.path} began with: its content is another; --overwrite "
            "starts anew"
        )
    return corpus


def _keep_tokenizer(used: Tokenizer, folder: Folder) -> None:
    """Beside the weights, which mean nothing without it."""
    write_text(folder.tokenizer, used.to_json())


def _kept_tokenizer(folder: Folder, saved: Checkpoint) -> Tokenizer:
    kept = tokenizer.read(folder.tokenizer)
    if tokenizer.digest(kept) != saved.facts["tokenizer"]:
        raise DamagedError(f"{folder.tokenizer} is not the tokenizer that the run began with")
    return kept


def _refuse_other_settings(settings: Settings, folder: Folder, saved: Checkpoint) -> None:
    differing = settings.differences(saved.facts["settings"])
    if differing:
        raise FolderError(
            f"the run in {folder.path} has other settings: {'; '.join(differing)}. Leave them out to continue it, or "
            "give another --out"
        )


def _facts(settings: Settings, corpus: Corpus, backend: Backend, ranks: Ranks) -> Facts:
    """What is found out before the first step and kept; the micro-batch only until memory runs out."""
    share = np.array_split(loop.rows_of_step(settings, corpus, 1), ranks.size)[0]
    memory = settings.memory if settings.micro_batch_size is None else UNLIMITED
    planned = ranks.from_first(lambda: backend.plan(share, memory))
    backend.use(planned.micro_batch_size)
    return {
        "settings": settings.as_dict(),
        "text": corpus.digest,
        "text_name": corpus.name,
        "text_tokens": len(corpus.training) + len(corpus.held_out),
        "tokenizer": tokenizer.digest(corpus.tokenizer),
        "tokenizer_name": corpus.tokenizer.name,
        "parameters": sum(int(np.prod(shape)) for shape in shapes(settings, corpus.tokenizer.size).values()),
        "micro_batch_size": planned.micro_batch_size,
        "memory_by_rows": {str(rows): peak for rows, peak in planned.curve.items()},
        "loss_before": backend.evaluate(loop.validation_rows(settings, corpus)),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES[settings.backend]},
        },
    }


def _finish(
    request: Request, screen: Screen, settings: Settings, corpus: Corpus, backend: Backend, folder: Folder, facts: Facts
) -> Facts:
    """Judge, sample, report, and seal what was written."""
    if request.compare:
        screen.note("comparing with the unsplit batch and the textbook loop ...")
        write_text(folder.comparison, as_json(compare(settings, corpus, facts["micro_batch_size"])))
    screen.note("checking that the split is exact, and writing the report ...")
    few = max(3, facts["micro_batch_size"] // 2)  # it computes in float64, and unsplit too
    judged = backend.check(loop.validation_rows(settings, corpus)[:few])
    prompt, continued = continuation(settings, backend, corpus)
    summary = summarise(
        facts,
        folder,
        exactness={"exact": judged.exact, "error": judged.error, "dtype": judged.dtype, "rows": judged.rows},
        sample={"prompt": prompt, "continued": continued},
    )
    folder.write_summary(summary)
    write_report(folder)
    folder.seal()
    return summary
