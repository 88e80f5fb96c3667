#!/usr/bin/env bash
# Builds the sdist and the wheel twice, in two folders and at two times, and compares them byte by byte.
# usage: .github/build-twice.sh [FOLDER]    the first build stays in FOLDER (default: a temporary one, removed)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}"
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet build

for name in first second; do
    mkdir "$place/$name"
    git ls-files -z --cached --others --exclude-standard | xargs -0 tar --create | tar --extract --directory "$place/$name"
    "$place/env/bin/python" -m build --outdir "$place/dist-$name" "$place/$name" >"$place/log" 2>&1 || { cat "$place/log"; exit 1; }
done

diff --recursive "$place/dist-first" "$place/dist-second" && echo "the same bytes twice:"
(cd "$place/dist-first" && sha256sum -- *)
[ $# = 0 ] || cp "$place/dist-first"/* "$1"
