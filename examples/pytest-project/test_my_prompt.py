"""A prompt of one's own on the session's engine, again after the engine's own cache was dropped."""


def test_my_prompt_twice(engine):
    prompt = engine.encode("The password is swordfish. " * 200)
    first = engine.generate_one("first", prompt, output_tokens=16, seed=0, ignore_eos=True)
    assert engine.reset_local_cache().local_reset
    again = engine.generate_one("again", prompt, output_tokens=16, seed=0, ignore_eos=True)
    assert again.cached_tokens, "nothing was reloaded, so nothing was tested"
    assert again.token_ids == first.token_ids
