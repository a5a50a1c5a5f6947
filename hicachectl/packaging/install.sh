#!/bin/sh
# Install hicachectl with its man pages, completions and deployment files below one prefix.
set -eu

usage() {
  cat <<'END'
usage: install.sh [--prefix DIR] [--python PROGRAM] [--extras NAMES] [SOURCE]

Install hicachectl into an environment of its own below DIR/lib, and make
DIR/lib/hicachectl a link to the environment. Link the command, the man pages, the
completions and the deployment files into DIR. Run the script again to install another
release in the same place. The earlier release stays until the new release works. To
uninstall, remove DIR/lib/hicachectl* and the links to it.

  SOURCE            a wheel, a source archive or a checkout; default: the checkout of this script
  --prefix DIR      where to install; default: /usr/local for root, else ~/.local
  --python PROGRAM  CPython 3.11 or later with the module venv; default: python3. The
                    users who are to run hicachectl must be able to run this PROGRAM
  --extras NAMES    extras of hicachectl, such as mooncake,tokenizers; mooncake-cpu is
                    Mooncake's build for machines without CUDA

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
source=$(CDPATH='' cd -- "$(dirname -- "$source")" && pwd)/$(basename -- "$source")
command -v -- "$python" >/dev/null || fail "$python: not found; install Python 3.11 or later"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python: older than Python 3.11; give a later one with --python"
if [ "$(id -u)" = 0 ]; then # the environment links to this Python
  closed=$("$python" -I - <<'END'
import os, sys

path = os.path.realpath(sys._base_executable)
program = path
while os.stat(path).st_mode & 0o001 and path != "/":
    path = os.path.dirname(path)
print(f"{path}: closed to other users, so they cannot run {program} and hicachectl" if path != "/" else "")
END
  )
  [ -z "$closed" ] || echo "install.sh: warning: $closed;" \
    "give a Python that all users can run, such as --python /usr/bin/python3" >&2
fi
[ -n "$prefix" ] || fail "--prefix: is empty; give a directory"
mkdir -p -- "$prefix/lib" || fail "$prefix: cannot be created; give another --prefix"
prefix=$(CDPATH='' cd -- "$prefix" && pwd -P)

# Only links that this script made are replaced.
installed=$prefix/lib/hicachectl
refuse_others() {
  for file in "$@"; do
    if [ -e "$prefix/$file" ] || [ -L "$prefix/$file" ]; then
      [ "$(readlink "$prefix/$file" || true)" = "$installed/$file" ] ||
        fail "$prefix/$file: not a link by this script; remove it, or give another --prefix"
    fi
  done
}
refuse_others bin/hicachectl
if [ -e "$installed" ] && [ ! -e "$installed/pyvenv.cfg" ]; then
  fail "$installed: not made by this script; remove it, or give another --prefix"
fi

work=
environment=
clean() {
  rm -rf -- "$work" "$environment"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' HUP TERM
work=$(mktemp -d)
environment=$(mktemp -d "$installed-XXXXXX") ||
  fail "$prefix/lib: cannot be written; give another --prefix, or run this as its owner"
chmod "=rwx" "$environment" # mktemp lets in only the owner; this mode follows the umask
"$python" -I -m venv "$environment" ||
  fail "$python: cannot make an environment; see above. Debian has venv in python3-venv"
unset PIP_PREFIX PIP_ROOT PIP_TARGET PIP_USER # pip would install outside the environment
pip() {
  "$environment/bin/python" -I -m pip --quiet --disable-pip-version-check "$@" ||
    fail "pip: see its messages above; without a network, see --help. Nothing was replaced"
}
if [ -d "$source" ]; then # build in a copy: a build in the checkout would leave its files there
  mkdir "$work/source"
  for name in pyproject.toml MANIFEST.in README.md LICENSE hicachectl backends formats man; do
    cp -RP "$source/$name" "$work/source/" ||
      fail "$source: not a whole checkout; give a wheel or a checkout"
  done
  source=$work/source
fi
pip wheel --no-deps --wheel-dir "$work" "$source"
for wheel in "$work"/*.whl; do
  pip install "$wheel${extras:+[$extras]}"
done

cd "$environment"
set -- bin/hicachectl share/hicachectl share/man/man[157]/hicachectl*.[157] \
  share/man/man5/hcpack.5 share/bash-completion/completions/hicachectl \
  share/zsh/site-functions/_hicachectl share/fish/vendor_completions.d/hicachectl.fish
for file in "$@"; do
  [ -e "$file" ] || fail "$file: not in the wheel; give another wheel or checkout"
done
refuse_others "$@"
bin/hicachectl --version || fail "$source: does not run with $python; see the message above"
earlier=$(readlink "$installed" || true)
"$environment/bin/python" -I - "$environment" "$installed" <<'END'
import os, sys

new, link = sys.argv[1:]
os.symlink(new, f"{new}.link")
if os.path.isdir(link) and not os.path.islink(link):  # an earlier script made a directory
    os.rename(link, f"{new}.earlier")
os.replace(f"{new}.link", link)
END
rm -rf -- "$environment.earlier"
environment= # so that `clean` keeps it
case $earlier in "$installed"-*) rm -rf -- "$earlier" ;; esac
for file in "$@"; do
  mkdir -p -- "$prefix/$(dirname "$file")"
  ln -sfn -- "$installed/$file" "$prefix/$file"
done
