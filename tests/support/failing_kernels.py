"""Factories of kernels that count, or that fail to build or to run like Metal's."""

from on_emulator import make, make_tiles

NOT_BUILT = (
    "[metal::Device] Unable to build metal library from source\n"
    "program_source:1312:5: error: use of undeclared identifier 'kv_level'\n"
    "    kv_level(code);\n    ^\n"
    "program_source:1340:9: error: no matching function for call to 'simd_sum'\n"
    "program_source:20:1: warning: unused variable\n"
)
LOST = "[METAL] Command buffer execution failed: Caused GPU Hang Error (00000003)"


def counting(built: list[str], tiles: bool = False):
    """Notes the name of every kernel that is built."""

    def build(name, *names, **texts):
        built.append(name)
        return (make_tiles if tiles else make)(name, *names, **texts)

    build.tiles = tiles
    return build


def unbuildable(part: str = "", tiles: bool = False):
    """The compiler refuses kernels with `part` in their names when they first run."""

    def build(name, *names, **texts):
        if part not in name:
            return make_tiles(name, *names, **texts)

        def call(**_):
            raise RuntimeError(NOT_BUILT)

        return call

    build.tiles = tiles
    return build


class Failing:
    """Kernels with `part` in their names raise after `left` more calls; None: never."""

    def __init__(self, part: str, tiles: bool = False, said: str = LOST):
        self.part, self.tiles, self.said, self.left = part, tiles, said, None

    def __call__(self, name, *names, **texts):
        kernel = make_tiles(name, *names, **texts)

        def call(**given):
            if self.part in name and self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise RuntimeError(self.said)
            return kernel(**given)

        return call


def broken(part, good, bad):
    """Replaces `good` by `bad` in the texts of kernels called `part`. held: whether each had `good`."""
    held = []

    def build(name, input_names, output_names, source, header=""):
        if name.startswith(part):
            held.append(good in source + header)
            source, header = source.replace(good, bad), header.replace(good, bad)
        return make(name, input_names, output_names, source, header)

    build.held = held
    return build
