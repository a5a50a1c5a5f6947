#!/bin/sh
# Install hicachectl with its man pages, completions and deployment files below one prefix.
set -eu

usage() {
  cat <<'END'
usage: install.sh [--prefix DIR] [--python PROGRAM] [--extras NAMES] [SOURCE]

Install hicachectl into an environment of its own, DIR/lib/hicachectl, and link the
command, the man pages, the completions and the deployment files into DIR.
Run it again to install another release in the same place. To uninstall, remove
DIR/lib/hicachectl and the links to it.

  SOURCE            a wheel, a source archive or a checkout; default: the checkout of this script
  --prefix DIR      default: /usr/local for root, else ~/.local
  --python PROGRAM  CPython 3.11 or later with the module venv; default: python3
  --extras NAMES    extras of hicachectl, such as mooncake,tokenizers

pip takes its settings from its environment variables and configuration. Without a network,
set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a directory with the wheels of all dependencies.
END
}

fail() {
  echo "install.sh: $*" >&2
  exit 2
}

if [ "$(id -u)" = 0 ]; then prefix=/usr/local; else prefix=${HOME:-}/.local; fi
python=python3
extras=
source=
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --prefix | --python | --extras)
      [ $# -gt 1 ] || fail "$1: needs a value; --help shows the options"
      case $1 in
        --prefix) prefix=$2 ;;
        --python) python=$2 ;;
        --extras) extras=$2 ;;
      esac
      shift 2
      ;;
    -*) fail "$1: unknown option; --help shows the options" ;;
    *)
      [ -z "$source" ] || fail "$1: only one SOURCE is installed; leave it out"
      source=$1
      shift
      ;;
  esac
done

if [ -z "$source" ]; then
  source=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
  [ -f "$source/pyproject.toml" ] || fail "$source: not a checkout; give a wheel or a checkout"
fi
[ -e "$source" ] || fail "$source: no such file or directory; give a wheel or a checkout"
mkdir -p "$prefix" || fail "$prefix: cannot be created; give another --prefix"
source=$(CDPATH='' cd -- "$(dirname -- "$source")" && pwd)/$(basename -- "$source")
prefix=$(CDPATH='' cd -- "$prefix" && pwd)
command -v "$python" >/dev/null || fail "$python: not found; install Python 3.11 or later"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python: older than Python 3.11; give a later one with --python"

environment=$prefix/lib/hicachectl
command=$prefix/bin/hicachectl
if [ -e "$command" ] && [ "$(readlink "$command" || true)" != "$environment/bin/hicachectl" ]; then
  fail "$command: not a link of this script; remove it, or give another --prefix"
fi
"$python" -m venv "$environment" ||
  fail "$python: cannot make an environment; install its module venv (Debian: python3-venv)"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() {
  "$environment/bin/python" -m pip --quiet --disable-pip-version-check "$@"
}
if [ -d "$source" ]; then # a build in the checkout would leave its files there
  mkdir "$work/source"
  for name in pyproject.toml MANIFEST.in README.md LICENSE hicachectl backends formats man; do
    cp -RP "$source/$name" "$work/source/"
  done
  source=$work/source
fi
pip wheel --no-deps --wheel-dir "$work" "$source"
for wheel in "$work"/*.whl; do
  pip install "$wheel${extras:+[$extras]}"
  pip install --force-reinstall --no-deps "$wheel" # another build can have the same version
done

cd "$environment"
for file in bin/hicachectl share/hicachectl share/man/man[157]/hicachectl*.[157] \
  share/man/man5/hcpack.5 share/bash-completion/completions/hicachectl \
  share/zsh/site-functions/_hicachectl share/fish/vendor_completions.d/hicachectl.fish; do
  [ -e "$file" ] || fail "$file: not in the wheel; give another wheel or checkout"
  mkdir -p "$prefix/$(dirname "$file")"
  ln -sfn "$environment/$file" "$prefix/$file"
done
"$command" --version
