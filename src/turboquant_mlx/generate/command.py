"""``turboquant-generate``: load a model, apply its chat template, stream the answer.

The answer, and nothing else, goes to standard output. Whatever else this command or a library
below it has to say goes to standard error. Generation, sampling and penalties are mlx-lm's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .. import cli
from ..errors import CheckpointError, OptionError
from ..kvcache.options import kv_options
from ..kvcache.spec import KVSpec, is_quantization_aware, resolve
from . import parser
from .chat import encode_prompt, read_prompt
from .defaults import read_generation_config, resolve_sampling
from .statistics import Statistics, mlx_peak_bytes, process_peak_bytes
from .stopping import end_token_ids, stop_token_ids

# How mlx-lm's models call the embedding of tokens; one of positions has another name.
_TOKEN_EMBEDDINGS = (
    "embed",
    "embed_in",
    "embed_tokens",
    "embedding",
    "embeddings",
    "tok_embeddings",
    "token_embeddings",
    "word_embeddings",
    "wte",
)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, with the folder that it came from."""

    folder: Path
    model: Any
    tokenizer: Any
    config: dict[str, Any]

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model can produce."""
        size = self.config.get("vocab_size")
        if size is None:
            # Models that read more than text describe their text part apart.
            text_config = self.config.get("text_config")
            size = text_config.get("vocab_size") if isinstance(text_config, dict) else None
        return size if isinstance(size, int) else len(self.tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``turboquant-generate``; returns the exit code."""
    return cli.run(_command, argv)


def load_model(
    path_or_repo: str, *, trust_remote_code: bool = False, cpu_expand: Any = "auto"
) -> LoadedModel:
    """Load what ``--model`` names.

    Raises:
        TurboQuantError: no such model, an incomplete or damaged one, no tokenizer.
    """
    from ..checkpoint.loader import load
    from ..checkpoint.source import resolve

    # The loader gets the name as given: it trusts more in a local folder than in a repo.
    model, tokenizer, config = load(
        path_or_repo,
        trust_remote_code=trust_remote_code,
        cpu_expand=cpu_expand,
        return_config=True,
    )
    folder = resolve(path_or_repo, allow_download=False)
    return LoadedModel(folder, model, tokenizer, config)


def stream_answer(responses: Iterable[Any], out: TextIO, statistics: Statistics) -> None:
    """Write the text of mlx-lm's responses to ``out`` as it comes, then a line end.

    Args:
        responses: ``GenerationResponse`` objects.
        statistics: kept up to date, so that it also holds after an interruption.
    """
    try:
        for response in responses:
            out.write(response.text)
            out.flush()
            statistics.update(response)
            cli.raise_if_interrupted()
    except KeyboardInterrupt:
        if statistics.generated_tokens:
            out.write("\n")
            out.flush()
        raise
    out.write("\n")
    out.flush()


def _command(argv: Sequence[str] | None) -> int:
    args = parser.build_parser().parse_args(argv)
    parser.refuse_unavailable(args)
    parser.refuse_contradictions(args)
    kv_spec = resolve(kv_options(args))
    prompt = read_prompt(args.prompt, sys.stdin)
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        # A terminal that cannot show a character gets a question mark, not a crash.
        out.reconfigure(errors="replace")
    # Libraries print (mlx-lm its memory warning, model code anything): not into the answer.
    with contextlib.redirect_stdout(sys.stderr):
        _answer(args, kv_spec, prompt, out)
    return cli.EXIT_OK


def _answer(args: argparse.Namespace, kv_spec: KVSpec | None, prompt: str, out: TextIO) -> None:
    _check_cpu_expand(args.cpu_expand)
    _check_cpu_awake(args.cpu_awake)
    loaded = load_model(
        args.model, trust_remote_code=args.trust_remote_code, cpu_expand=args.cpu_expand
    )
    tokenizer = loaded.tokenizer
    generation_config = read_generation_config(loaded.folder)
    sampling = resolve_sampling(
        generation_config,
        vocabulary=loaded.vocabulary,
        temp=args.temp,
        top_p=args.top_p,
        top_k=args.top_k,
        rep_penalty=args.rep_penalty,
        rep_ctx=args.rep_ctx,
        seed=args.seed,
    )
    end_ids = end_token_ids(tokenizer, loaded.config, generation_config)
    end_ids |= stop_token_ids(tokenizer, args.stop, loaded.vocabulary)
    # mlx-lm ends at these ids and keeps their text out of the answer.
    tokenizer.eos_token_ids = end_ids
    encoded = encode_prompt(tokenizer, prompt, no_think=args.no_think)
    for notice in sampling.notices + encoded.notices:
        cli.notice(notice)
    _check_ids(encoded.tokens, loaded)
    _check_length(len(encoded.tokens), loaded.config)
    _apply_model_options(args, loaded.model)
    if args.verbose:
        _describe_backend(loaded.model)
    prompt_cache = _prompt_cache(loaded, kv_spec, args.model)

    import mlx.core as mx
    from mlx_lm import stream_generate

    from ..kernels.awake import cores_awake
    from . import processors

    if args.seed is not None:
        mx.random.seed(args.seed)
    statistics = Statistics()
    responses = stream_generate(
        loaded.model,
        tokenizer,
        encoded.tokens,
        max_tokens=args.max_tokens,
        sampler=processors.build_sampler(sampling),
        logits_processors=processors.build_processors(
            sampling,
            min_tokens=args.min_tokens,
            end_ids=end_ids,
            think_end=None if args.multi_think else processors.think_end_id(tokenizer),
        ),
        prompt_cache=prompt_cache,
        prefill_step_size=args.prefill_step_size,
    )
    awake = cores_awake() if args.cpu_awake else contextlib.nullcontext()
    try:
        with awake, contextlib.closing(responses):
            stream_answer(_checked(responses, loaded), out, statistics)
    finally:
        if statistics.generated_tokens:
            print(f"sampling: {sampling.describe()}", file=sys.stderr)
            for line in statistics.lines(mlx_peak_bytes(), process_peak_bytes()):
                print(line, file=sys.stderr)
            _report_cache(prompt_cache, kv_spec)
    if statistics.finish_reason == "stop" and statistics.generated_tokens == 1:
        cli.notice("the model ended at once; --min-tokens 1 makes it write something")


def _check_ids(tokens: Sequence[int], loaded: LoadedModel) -> None:
    """Refuse tokens that the model has no embedding for; MLX would read whatever is there.

    Raises:
        CheckpointError: the tokenizer gives such a token.
    """
    rows = _embedding_rows(loaded.model) or loaded.vocabulary
    token = max(tokens)
    if token >= rows:
        text = loaded.tokenizer.decode([token])
        raise CheckpointError(
            f"{loaded.folder}: the tokenizer gives the token {token} ({text!r}), but the model "
            f"has tokens up to {rows - 1} only",
            hint="its tokenizer files may be those of another model",
        )


def _embedding_rows(model: Any) -> int:
    """Tokens that the model's embedding has a row for; 0 where none is found."""
    return max(
        (
            module.weight.shape[0]
            for path, module in model.named_modules()
            if path.rpartition(".")[2] in _TOKEN_EMBEDDINGS and "weight" in module
        ),
        default=0,
    )


def _check_length(prompt_tokens: int, config: Mapping[str, Any]) -> None:
    """Say it if a prompt is longer than what the model was made for."""
    from ..kvcache.geometry import text_config

    longest = text_config(config).get("max_position_embeddings")
    if isinstance(longest, int) and prompt_tokens > longest > 0:
        cli.notice(
            f"the prompt has {prompt_tokens:,} tokens and this model is made for {longest:,}: it "
            "may write nonsense"
        )


def _prompt_cache(loaded: LoadedModel, spec: KVSpec | None, name: str) -> list[Any]:
    """The model's caches, packed where ``spec`` asks for it.

    Raises:
        CheckpointError: the model cannot make any.
        OptionError: none of this model's caches can be packed.
    """
    from mlx_lm.models.cache import make_prompt_cache

    from ..checkpoint.named_error import named_run_errors
    from ..kvcache.install import CacheReport, pack_prompt_cache, qat_message

    model = loaded.model
    with named_run_errors(loaded.folder, model):
        caches = make_prompt_cache(model)
    if spec is None:
        return caches
    if is_quantization_aware(name):
        cli.notice(qat_message(name))
        return caches
    pack_prompt_cache(caches, spec, model)
    report = CacheReport.of(caches)
    if not report.packed:
        kinds = ", ".join(sorted(report.left))
        raise OptionError(
            f"the key-value cache of this model cannot be packed: its layers have {kinds}",
            hint="run it without --kv-bits (and without the variable KV_BITS)",
        )
    left = report.left_alone()
    if left:
        cli.notice(left)
    return caches


def _report_cache(prompt_cache: list[Any], spec: KVSpec | None) -> None:
    """Say what the cache really cost, and if it came to nothing that was asked for."""
    from ..kvcache.install import CacheReport

    report = CacheReport.of(prompt_cache)
    if report.held:
        print(report.describe(), file=sys.stderr)
    if spec is not None and report.widest and spec.group_size > report.widest:
        cli.notice(
            f"--kv-group-size {spec.group_size} is more than a head of this model has: all "
            f"{report.widest} values of one share a scale"
        )
    if spec is not None and report.packed and not report.frozen:
        cli.notice(
            f"nothing was packed: a sequence is packed when it has {spec.warm_tokens} tokens"
        )


def _checked(responses: Iterable[Any], loaded: LoadedModel) -> Iterable[Any]:
    """The responses as they come, if the model's first prediction consists of numbers.

    One damaged value spreads over all of it, and the answer would be of tokens that mean nothing.

    Raises:
        CheckpointError: it does not, or the model's code fails.
    """
    import mlx.core as mx

    from ..checkpoint.named_error import named_run_errors

    with named_run_errors(loaded.folder, loaded.model):
        for number, response in enumerate(responses):
            # later ones are not looked at: that would wait for the token computed meanwhile
            if number == 0 and mx.isnan(response.logprobs).any().item():
                raise CheckpointError(
                    f"{loaded.folder}: the model computes values that are not numbers",
                    hint="a file is damaged, or a sampling option is far beyond what is usual",
                )
            yield response


def _check_cpu_expand(cpu_expand: str) -> None:
    if cpu_expand == "auto":
        return
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.cpu:
        raise OptionError(
            f"--cpu-expand {cpu_expand} does not apply: MLX runs on the GPU here",
            hint="leave it out; the packed weights are read by the GPU as they are",
        )


def _check_cpu_awake(cpu_awake: bool) -> None:
    if not cpu_awake:
        return
    from ..kernels.awake import why_not_awake

    reason = why_not_awake()
    if reason:
        raise OptionError(
            f"--cpu-awake does not apply: {reason}",
            hint="leave it out; it changes nothing but the speed",
        )


def _describe_backend(model: Any) -> None:
    """Say what multiplies by the weights of this model here."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from ..layers.report import describe_backend

    # Our layers keep the dtype of their input, which is that of the norms and embeddings.
    floats = (mx.float32, mx.float16, mx.bfloat16)
    dtypes = [
        value.dtype
        for name, value in tree_flatten(model.parameters())
        if value.dtype in floats and name.rpartition(".")[2] == "weight"
    ]
    for line in describe_backend(model, dtypes[0] if dtypes else mx.float32):
        print(line, file=sys.stderr)


def _apply_model_options(args: argparse.Namespace, model: Any) -> None:
    """Switch QJL off where asked for; say which options this model gives nothing to do."""
    if args.cpu_expand == "auto" and not args.fast:
        return
    from ..layers.cpu import expanded_bytes
    from ..layers.install import set_qjl

    if args.cpu_expand != "auto" and not expanded_bytes(model):
        cli.notice("--cpu-expand has no effect: this model has no weights to expand")
    if args.fast and not set_qjl(model, False):
        cli.notice("--fast has no effect: this model has no QJL correction")
