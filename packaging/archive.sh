#!/usr/bin/env bash
# Packs a release archive: the binary, licences, completions and the manual page.
#
# usage: packaging/archive.sh BINARY TARGET VERSION FOLDER    prints the archive's path, FOLDER/paguro-VERSION-TARGET.tar.gz
#
# The archive of a Windows target is a zip file. The binary must run on this system: it writes its own completions.
set -euo pipefail

if [ $# -ne 4 ]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
binary=$(realpath "$1") target=$2 version=$3
mkdir -p "$4"
out=$(realpath "$4")
cd "$(dirname "$0")/.."

name=paguro-$version-$target
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=$work/$name
mkdir -p "$folder/completions" "$folder/man"
cp "$binary" README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE "$folder"
case $target in *linux*) strip "$folder/paguro" ;; esac
"$binary" completions bash > "$folder/completions/paguro.bash"
"$binary" completions zsh > "$folder/completions/_paguro"
"$binary" completions fish > "$folder/completions/paguro.fish"
"$binary" completions powershell > "$folder/completions/_paguro.ps1"
"$binary" man > "$folder/man/paguro.1"

case $target in
  *windows*)
    archive=$out/$name.zip
    rm -f "$archive"
    (cd "$work" && if command -v zip >/dev/null; then zip -qr "$archive" "$name"; else 7z a -bso0 "$archive" "$name"; fi)
    ;;
  *)
    archive=$out/$name.tar.gz
    tar -czf "$archive" -C "$work" "$name"
    ;;
esac
echo "$archive"
