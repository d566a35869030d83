"""Programs of others: the functions by which they load models are wrapped, so that what they load gets
compressed caches. `watch` waits for the modules, `wrap` wraps them, `ledger` counts what caches held."""
