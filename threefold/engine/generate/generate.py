"""Continues prompts token by token with a cache, until each has ended. `engine/sample.py` calls it.

The time of a token does not grow with the text before it, but for attention to the cache.
"""

from collections.abc import Collection, Iterator, Sequence

from threefold.engine.generate.cached_decoder import CachedDecoder
from threefold.engine.generate.choose_tokens import Sampling, TokenChooser
from threefold.engine.generate.picture_prompt import PicturePrompt
from threefold.engine.models.decoder import Decoder


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling | None = None,
    ends: Collection[int] = (),
    pictures: Sequence[PicturePrompt | None] | None = None,
) -> Iterator[list[int | None]]:
    """The next token of each prompt, at most `max_tokens` times; None for a row that has ended.

    A row ends behind a token of `ends`, which is still given. The model must be whole and on one rank. `pictures` are
    those of each prompt.
    """
    if max_tokens < 1:
        return
    model.eval()
    chooser = TokenChooser(sampling or Sampling(), len(prompts))
    cached = CachedDecoder(model)
    logits_BV = cached.prefill(prompts, pictures)
    has_ended = [False] * len(prompts)
    for count in range(1, max_tokens + 1):
        chosen = chooser.choose(logits_BV)
        yield [None if ended else token for token, ended in zip(chosen, has_ended, strict=True)]
        has_ended = [ended or token in ends for token, ended in zip(chosen, has_ended, strict=True)]
        if all(has_ended) or count == max_tokens:
            return
        logits_BV = cached.step(chosen)
