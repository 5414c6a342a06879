//! Files of models: only regular ones are opened, they are read at positions, and a change shows.
//!
//! Nothing is mapped: a mapped file that another process truncates kills the reader with SIGBUS
//! (`docs/decisions/0011-reading-weights.md`).

use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use paguro_backend::ByteSource;

/// Opens a regular file for reading. Other files (a named pipe, a device, a folder) are refused without blocking.
pub(crate) fn open_regular(path: &Path) -> io::Result<(File, Metadata)> {
    // Opening some devices has effects, so the kind is checked before and, against races, after.
    check_kind(&std::fs::metadata(path)?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    check_kind(&metadata)?;
    Ok((file, metadata))
}

/// Fails unless this is a regular file.
fn check_kind(metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    if kind.is_file() {
        return Ok(());
    }
    #[cfg(unix)]
    let special = {
        use std::os::unix::fs::FileTypeExt;
        [
            (kind.is_fifo(), "a named pipe"),
            (kind.is_socket(), "a socket"),
            (kind.is_char_device() || kind.is_block_device(), "a device"),
        ]
    };
    #[cfg(not(unix))]
    let special: [(bool, &str); 0] = [];
    let special = special.into_iter().find(|(is_kind, _)| *is_kind).map(|(_, name)| name);
    let found = special.unwrap_or(if kind.is_dir() { "a folder" } else { "something else" });
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {found}, not a regular file")))
}

/// A file with weights. A file that replaces it by renaming is another file and changes nothing here.
pub(crate) struct WeightFile {
    file: File,
    path: PathBuf,
    size: u64,
    modified: Option<SystemTime>,
}

impl WeightFile {
    /// Opens the file without reading it.
    pub(crate) fn open(path: &Path) -> io::Result<Arc<dyn ByteSource>> {
        let (file, metadata) = open_regular(path)?;
        let (size, modified) = (metadata.len(), metadata.modified().ok());
        Ok(Arc::new(Self { file, path: path.to_owned(), size, modified }))
    }

    fn changed(&self) -> io::Error {
        io::Error::other(format!(
            "`{}` was changed while it was read; load the model again when its file is complete",
            self.path.display()
        ))
    }
}

impl ByteSource for WeightFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        read_exact_at(&self.file, offset, out).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.changed(),
            kind => io::Error::new(kind, format!("`{}`: {error}", self.path.display())),
        })
    }

    fn check_unchanged(&self) -> io::Result<()> {
        let now = self.file.metadata()?;
        if (now.len(), now.modified().ok()) == (self.size, self.modified) {
            Ok(())
        } else {
            Err(self.changed())
        }
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, offset: u64, out: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut offset: u64, mut out: &mut [u8]) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                out = &mut out[read..];
                offset += read as u64;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_that_changes_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        fs::write(&path, [7; 1000]).unwrap();
        let file = WeightFile::open(&path).unwrap();
        let mut out = [0; 100];
        file.read_at(900, &mut out).unwrap();
        assert_eq!(out, [7; 100]);
        file.check_unchanged().unwrap();

        // Another file under this name is not the one that is open.
        fs::write(folder.path().join("other"), [8; 1000]).unwrap();
        fs::rename(folder.path().join("other"), &path).unwrap();
        file.read_at(0, &mut out).unwrap();
        assert_eq!(out, [7; 100]);
        file.check_unchanged().unwrap();

        let file = WeightFile::open(&path).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(500).unwrap();
        assert!(file.check_unchanged().is_err());
        let error = file.read_at(450, &mut out).unwrap_err().to_string();
        assert!(error.contains("was changed while it was read"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let error = |path: &Path| open_regular(path).unwrap_err().to_string();
        assert_eq!(error(&socket), "it is a socket, not a regular file");
        assert_eq!(error(&pipe), "it is a named pipe, not a regular file");
        assert_eq!(error(Path::new("/dev/zero")), "it is a device, not a regular file");
        assert_eq!(error(folder.path()), "it is a folder, not a regular file");
    }
}
