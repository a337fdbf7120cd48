"""Between the documented tuples of tensors and the typed batch, and the exam of an environment stepped by hand."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from agilerl.checks.arguments import Having, described
from agilerl.data import Completion, RolloutBatch
from agilerl.data.checks import check_vocabulary, mask_rows, number_rows, one_row, token_rows
from agilerl.errors import ConfigError
from agilerl.processes import Processes
from agilerl.sizes import padded_length


class ActionResult(NamedTuple):
    """Completions of a list of prompts."""

    completion_ids: list[Tensor]
    """Per prompt [G, P + L]: prompt and completion, right-padded."""
    action_masks: list[Tensor]
    """Per prompt [G, P + L - 1], True where the next token was sampled."""
    sampling_logps: list[Tensor | None]
    """Per row, prompts in order: 1-D log-probs of the sampled tokens; None if the engine does not report them."""


def prompt_ids(obs: Any, vocabulary: int) -> list[list[int]]:
    """Return the token ids of each prompt of an observation.

    ``obs`` is a list of mappings with ``input_ids`` ([1, P] or [P]), or one of them. Tokens that an ``attention_mask``
    of the same shape leaves out are padding and are dropped. Raises ConfigError for anything else, several prompts in
    one entry included, and for ids beyond the vocabulary.
    """
    prompts = [obs] if isinstance(obs, Mapping) else obs
    if not isinstance(prompts, list | tuple) or not prompts:
        given = "none" if isinstance(prompts, list | tuple) else described(obs)
        raise ConfigError(f"get_action(obs=...): expected prompts with input_ids [1, P] each, found {given}")
    return [_prompt(prompt, f"get_action, prompt {number}", vocabulary) for number, prompt in enumerate(prompts)]


def _prompt(prompt: Any, where: str, vocabulary: int) -> list[int]:
    if not isinstance(prompt, Mapping) or "input_ids" not in prompt:
        keys = f"the keys {', '.join(map(str, prompt)) or 'none'}" if isinstance(prompt, Mapping) else ""
        raise ConfigError(
            f"{where}: expected a mapping with input_ids [1, P], found {keys or described(prompt)}; pass "
            'tokenizer(text, return_tensors="pt"), or what env.reset() returns'
        )
    ids = one_row(prompt["input_ids"], f"{where}: input_ids")
    if prompt.get("attention_mask") is not None:
        mask = mask_rows(prompt["attention_mask"], f"{where}: attention_mask").reshape(-1).tolist()
        if len(mask) != len(ids):
            raise ConfigError(f"{where}: expected attention_mask as long as input_ids, {len(ids)}, found {len(mask)}")
        ids = [token for token, is_real in zip(ids, mask) if is_real]
    if not ids:
        raise ConfigError(f"{where}: expected a prompt of one token or more, found an attention_mask that is all 0")
    check_vocabulary(ids, vocabulary, f"{where}: input_ids")
    return ids


def action_result(
    prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]], pad_token_id: int
) -> ActionResult:
    """Stack each prompt's completions."""
    result = ActionResult([], [], [])
    for prompt, group in zip(prompts, groups):
        rows = [torch.tensor([*prompt, *completion.token_ids]) for completion in group]
        result.completion_ids.append(pad_sequence(rows, batch_first=True, padding_value=pad_token_id))
        # Column t is about token t + 1.
        next_token = torch.arange(1, max(map(len, rows)))
        ends = torch.tensor([len(row) for row in rows])
        result.action_masks.append((next_token >= len(prompt)) & (next_token < ends[:, None]))
        result.sampling_logps.extend(None if c.logprobs is None else torch.tensor(c.logprobs) for c in group)
    return result


def to_batch(
    experiences: Any,
    pad_token_id: int,
    turn_ids: Tensor | Sequence[Tensor] | None = None,
    sampling_logps: Sequence[Tensor | None] | None = None,
    group_size: int = 1,
) -> RolloutBatch:
    """Turn ``(completion_ids, action_masks, rewards)`` into a batch.

    ``completion_ids`` and ``action_masks`` are lists with one tensor a prompt, whose rows form a group, or one stacked
    tensor, whose groups are ``group_size`` consecutive rows; so are those of a list of single rows. ``rewards`` has one
    number a row, as ``[rows]``, ``[rows, 1]`` or ``[prompts, group]``; or is ``[rows, turns]`` if there are
    ``turn_ids`` [rows, T-1]; both may be lists with one tensor a row, of any lengths. ``sampling_logps`` has the
    log-probs of each row's sampled tokens; if they are missing for one row, the batch has none. Raises ConfigError when
    the parts do not fit each other.
    """
    if not isinstance(experiences, list | tuple) or len(experiences) != 3:
        raise ConfigError(
            "learn(experiences=...): expected (completion_ids, action_masks, rewards), as get_action and env.step "
            f"return them, or a RolloutBatch, found {described(experiences)}"
        )
    completion_ids, action_masks, rewards = experiences
    stacked = isinstance(completion_ids, Tensor)
    # The parts, checked against each other.
    ids = _groups(completion_ids, token_rows, "completion_ids", group_size)
    masks = _groups(action_masks, mask_rows, "action_masks", group_size)
    rows = sum(len(i) for i in ids)
    _check_rows(ids, masks, group_size if stacked else 1)
    # [prompts, group], for groups of consecutive rows and for those of a list.
    shapes = {(rows // size, size) for size in (group_size, rows // len(ids)) if rows % size == 0}
    by_row = _rewards(rewards, rows, shapes, per_turn=turn_ids is not None)
    # Single rows, as of get_action with repeat_prompts=False: a group is group_size of them in a row.
    expanded = not stacked and len(ids) == rows
    # All rows in one padded matrix.
    length = padded_length(max(i.shape[1] for i in ids))
    wide = torch.cat([pad(i.cpu().long(), (0, length - i.shape[1]), value=pad_token_id) for i in ids])
    mask = torch.cat([pad(m.cpu().bool(), (0, length - 1 - m.shape[1])) for m in masks])
    numbers = torch.arange(len(ids)) // (group_size if expanded else 1)
    groups = numbers.repeat_interleave(torch.tensor([len(i) for i in ids]))
    turns = torch.where(mask, 0, -1)
    if turn_ids is not None:
        for row, ids_of_turns in enumerate(_by_row(turn_ids, rows, max(m.shape[1] for m in masks))):
            # Only actions have a turn, whatever the given ids say elsewhere.
            turns[row, : len(ids_of_turns)] = torch.where(mask[row, : len(ids_of_turns)], ids_of_turns.cpu(), -1)
    if not mask.any():
        raise ConfigError(
            "learn(experiences=...): expected action_masks that mark the tokens to learn from, found none marked in "
            f"{rows} rows; pass those of get_action"
        )
    # Attention is causal, so tokens after a row's last action cannot influence anything.
    positions = torch.arange(1, length)[None]
    lengths = torch.where(mask, positions + 1, 0).amax(dim=1).clamp(min=1)
    return RolloutBatch(
        ids=wide,
        lengths=lengths,
        action_mask=mask,
        turn_ids=turns,
        rewards=by_row,
        groups=groups,
        sampling_logps=_sampled(sampling_logps, mask),
    )


def _groups(parts: Any, read: Callable[[Any, str], Tensor], name: str, group_size: int) -> list[Tensor]:
    """Return one matrix a prompt, of a list of them or of one stacked tensor."""
    where = f"learn({name}=...)"
    if isinstance(parts, Tensor):
        return list(torch.split(read(parts, where), group_size))
    if not isinstance(parts, Sequence) or isinstance(parts, str | bytes) or not parts:
        given = "none" if isinstance(parts, list | tuple) else described(parts)
        raise ConfigError(f"{where}: expected a list with one tensor a prompt, or one stacked tensor, found {given}")
    return [read(part, f"{where}, entry {number}") for number, part in enumerate(parts)]


def _check_rows(ids: Sequence[Tensor], masks: Sequence[Tensor], group_size: int) -> None:
    rows = sum(len(i) for i in ids)
    if rows % group_size:
        raise ConfigError(
            f"stacked completion_ids hold groups of group_size={group_size} consecutive rows, found {rows} rows; stack "
            "whole groups, or give a list with one tensor a prompt"
        )
    if [len(i) for i in ids] != [len(m) for m in masks] or any(
        i.shape[1] != m.shape[1] + 1 for i, m in zip(ids, masks)
    ):
        raise ConfigError(
            "every action mask must have as many rows as its completion ids and one column less, found ids "
            f"{[tuple(i.shape) for i in ids]} and masks {[tuple(m.shape) for m in masks]}"
        )


def _by_row(turn_ids: Tensor | Sequence[Tensor], rows: int, positions: int) -> list[Tensor]:
    if not isinstance(turn_ids, Tensor | list | tuple):
        raise ConfigError(f"learn(turn_ids=...): expected turn_ids [rows, T-1], found {described(turn_ids)}")
    parts = list(turn_ids) if isinstance(turn_ids, list | tuple) else [turn_ids]
    turns = [row for part in parts for row in token_rows(part, "learn(turn_ids=...)")]
    if len(turns) != rows:
        raise ConfigError(f"expected turn_ids for {rows} rows, found them for {len(turns)}")
    longest = max((len(row) for row in turns), default=0)
    if longest > positions:
        raise ConfigError(f"expected turn_ids [rows, T-1], at most as wide as masks, {positions}, found {longest}")
    return turns


def _rewards(rewards: Any, rows: int, shapes: Collection[tuple[int, ...]], *, per_turn: bool) -> Tensor:
    where = "learn(rewards=...)"
    if isinstance(rewards, (list, tuple)) and rewards and isinstance(rewards[0], Tensor):
        rewards = [number_rows(part, where) for part in rewards]
        if per_turn and len(rewards) == rows:
            ragged = [r.reshape(-1).to(torch.float32) for r in rewards]
            return pad_sequence(ragged, batch_first=True, padding_value=float("nan")).cpu()
        rewards = torch.cat([r.reshape(-1) for r in rewards])
    tensor = number_rows(rewards, where).cpu()
    if tensor.dim() == 2 and tensor.shape[0] == rows and (per_turn or tensor.shape[1] == 1):
        return tensor
    # Any other shape of as many numbers (a transposed one, say) would give completions each other's rewards.
    orders = {(rows,), (rows, 1), (1, rows), *shapes}
    if tensor.shape not in orders:
        known = " or ".join(str(list(shape)) for shape in sorted(orders, key=len))
        raise ConfigError(f"expected {rows} rewards in row order, of shape {known}, found {list(tensor.shape)}")
    return tensor.reshape(rows, 1)


def _sampled(logps: Sequence[Tensor | None] | None, mask: Tensor) -> Tensor | None:
    if logps is None:
        return None
    where = "learn(sampling_logps=...)"
    if not isinstance(logps, Tensor | list | tuple):
        raise ConfigError(f"{where}: expected a list with one tensor of log-probs a row, found {described(logps)}")
    known = [number_rows(row, where).reshape(-1).cpu() for row in logps if row is not None]
    if not known or len(known) < len(logps):
        return None
    flat = torch.cat(known)
    if flat.numel() != int(mask.sum()):
        raise ConfigError(f"sampling_logps hold {flat.numel()} numbers, the action masks mark {int(mask.sum())}")
    # It fills row by row, which is the order of flat.
    return torch.zeros(mask.shape).masked_scatter(mask, flat)


# -- the exam: greedy play of one agent on an environment that is stepped by hand -------------------------------------


Environment = Annotated[
    Any,
    Having("an environment", ("reset", "step"), "pass a ReasoningGym, e.g. ReasoningGym.from_task(task, tokenizer)"),
]


def examine(agent: Any, env: Any, loop: int) -> np.ndarray:
    """Return the scores of an exam as one flat array: ``loop`` batches, or episodes, of greedy completions.

    An environment may define its exam: ``env.examine(agent, loop)``.
    """
    if hasattr(env, "examine"):
        return np.asarray(env.examine(agent, loop), dtype=np.float64)
    if not hasattr(env, "eval_mode"):
        raise ConfigError(
            f"test(env=...): expected an environment with a test set (eval_mode), found {described(env)}; wrap a "
            "multi-turn one in TokenObservationWrapper"
        )
    rewards: list[np.ndarray] = []
    with env.eval_mode():
        prompts = env.reset()
        for _ in range(loop):
            action = agent.get_action(prompts, training=False)
            agent.tokens["evaluated"] += sum(int(m.sum()) for m in action.action_masks)
            prompts, reward = env.step(action.completion_ids)
            rewards.append(np.asarray(reward, dtype=np.float64).reshape(-1))
    return np.concatenate(rewards)


def of_all(processes: Processes, scores: np.ndarray) -> np.ndarray:
    """Return the scores of all processes, each of which takes a part of the exam."""
    if processes.size == 1:
        return scores
    # float64 is what frombuffer reads by default.
    return np.concatenate([np.frombuffer(part) for part in processes.gather(scores.astype(np.float64).tobytes())])
