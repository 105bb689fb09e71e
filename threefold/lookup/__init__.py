"""One search over what Threefold knows: findings, plan fields, commands, pages, words, settings, recipes, runs."""
