#!/bin/sh
# Installs a prebuilt paguro: downloads the archive of this system, compares its SHA-256 with the release's, and moves the
# binary into place in one step. An error at any point leaves an installed paguro as it was.
#
#   curl -fsSL https://raw.githubusercontent.com/paguro/paguro/main/packaging/install.sh | sh
#
# PAGURO_VERSION       the release, such as 0.1.0 (default: the latest one)
# PAGURO_INSTALL_DIR   the folder of the binary (default: ~/.local/bin)
# PAGURO_DOWNLOAD_URL  a folder with the archives and SHA256SUMS, instead of the release's page
set -eu

fail() {
  echo "error: $*" >&2
  exit 1
}

# The Rust target of this system.
target() {
  system=$(uname -s)
  machine=$(uname -m)
  case $machine in
    x86_64 | amd64) machine=x86_64 ;;
    aarch64 | arm64) machine=aarch64 ;;
    *) fail "there is no prebuilt binary for $system on $machine; build it with cargo" ;;
  esac
  case $system in
    Linux)
      if ldd --version 2>&1 | grep -qi musl; then
        fail "prebuilt binaries need glibc 2.28 or newer, and this system has musl; build paguro with cargo"
      fi
      echo "$machine-unknown-linux-gnu"
      ;;
    Darwin)
      # A shell under Rosetta reports x86_64 on Apple silicon.
      if [ "$machine" = x86_64 ] && [ "$(sysctl -n sysctl.proc_translated 2>/dev/null)" = 1 ]; then
        machine=aarch64
      fi
      [ "$machine" = aarch64 ] || fail "prebuilt binaries for macOS need Apple silicon; build paguro with cargo"
      echo aarch64-apple-darwin
      ;;
    *) fail "there is no prebuilt binary for $system here; Windows archives are on the release's page" ;;
  esac
}

# Downloads URL to FILE; fails if the transfer is incomplete.
download() {
  if command -v curl >/dev/null; then
    curl -fsSL --retry 2 --connect-timeout 20 -o "$2" "$1"
  elif command -v wget >/dev/null; then
    wget -q --tries=2 --timeout=20 -O "$2" "$1"
  else
    fail "this script needs curl or wget"
  fi
}

sha256() {
  if command -v sha256sum >/dev/null; then
    sha256sum "$1" | cut -d ' ' -f 1
  elif command -v shasum >/dev/null; then
    shasum -a 256 "$1" | cut -d ' ' -f 1
  else
    fail "this script needs sha256sum or shasum to check the download"
  fi
}

main() {
  releases=https://github.com/paguro/paguro/releases
  if [ -n "${PAGURO_DOWNLOAD_URL:-}" ]; then
    url=${PAGURO_DOWNLOAD_URL%/}
  elif [ -n "${PAGURO_VERSION:-}" ]; then
    url=$releases/download/v${PAGURO_VERSION#v}
  else
    url=$releases/latest/download
  fi
  folder=${PAGURO_INSTALL_DIR:-${HOME:?set PAGURO_INSTALL_DIR, because HOME is not set}/.local/bin}
  target=$(target)

  work=$(mktemp -d)
  new=
  trap 'rm -rf "$work" ${new:+"$new"}' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM

  download "$url/SHA256SUMS" "$work/SHA256SUMS" || fail "cannot download $url/SHA256SUMS; is there such a release?"
  # A line is a checksum, two spaces and a file name.
  line=$(grep -E "^[0-9a-f]{64} [ *]paguro-[0-9A-Za-z.+-]*-$target\.tar\.gz\$" "$work/SHA256SUMS" | head -n 1) \
    || fail "this release has no archive for $target"
  [ -n "$line" ] || fail "this release has no archive for $target"
  expected=${line%% *}
  archive=${line##*[ *]}

  echo "downloading $archive" >&2
  download "$url/$archive" "$work/$archive" || fail "the download of $url/$archive is incomplete; run this script again"
  actual=$(sha256 "$work/$archive")
  [ "$actual" = "$expected" ] \
    || fail "$archive has the SHA-256 $actual, and the release names $expected; nothing was installed"

  tar -xzf "$work/$archive" -C "$work" || fail "$archive cannot be unpacked"
  binary=$work/${archive%.tar.gz}/paguro
  [ -f "$binary" ] || fail "$archive has no binary; nothing was installed"
  chmod 755 "$binary"
  version=$("$binary" --version) || fail "the binary does not run on this system; nothing was installed"

  mkdir -p "$folder"
  new=$folder/.paguro.$$
  cp "$binary" "$new"
  mv -f "$new" "$folder/paguro"
  new=
  echo "installed $version as $folder/paguro" >&2
  case ":$PATH:" in
    *":$folder:"*) ;;
    *) echo "note: $folder is not in PATH" >&2 ;;
  esac
}

# The last line: a script that was cut off in the middle does nothing.
main "$@"
