//! The jobs that wait, in the order in which they are served: first come, first served.

use std::collections::VecDeque;

use crate::ids::{JobId, Tenant};

/// Waiting jobs, each with its tenant.
#[derive(Debug, Default)]
pub struct Queue {
    waiting: VecDeque<(JobId, Tenant)>,
}

/// Why a job may not wait.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueFull {
    /// Too many in all.
    #[error("{limit} jobs wait already, no more are taken: try again later")]
    All {
        /// How many may wait.
        limit: usize,
    },
    /// Too many of one tenant.
    #[error("{limit} jobs of {tenant} wait already, no more are taken: try again later")]
    Tenant {
        /// How many of one tenant may wait.
        limit: usize,
        /// Whose.
        tenant: Tenant,
    },
}

impl Queue {
    /// Puts a job at the end.
    ///
    /// # Errors
    /// As many wait as may.
    pub fn push(&mut self, job: JobId, tenant: Tenant, limit: usize, tenant_limit: usize) -> Result<(), QueueFull> {
        if self.waiting.len() >= limit {
            return Err(QueueFull::All { limit });
        }
        if self.waiting.iter().filter(|(_, other)| *other == tenant).count() >= tenant_limit {
            return Err(QueueFull::Tenant { limit: tenant_limit, tenant });
        }
        self.waiting.push_back((job, tenant));
        Ok(())
    }

    /// Takes the job whose turn it is.
    pub fn pop(&mut self) -> Option<JobId> {
        self.waiting.pop_front().map(|(job, _)| job)
    }

    /// Takes a job out, wherever it stands.
    pub fn remove(&mut self, job: &JobId) {
        self.waiting.retain(|(other, _)| other != job);
    }

    /// Jobs that are served before this one; `None` if it does not wait.
    pub fn ahead_of(&self, job: &JobId) -> Option<usize> {
        self.waiting.iter().position(|(other, _)| other == job)
    }

    /// The jobs in their order.
    pub fn iter(&self) -> impl Iterator<Item = &JobId> {
        self.waiting.iter().map(|(job, _)| job)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_come_first_served_within_the_bounds() {
        let mut queue = Queue::default();
        let (a, b) = (Tenant::from("uid:1"), Tenant::from("uid:2"));
        let job = |n: usize| JobId::from(n.to_string());
        queue.push(job(0), a.clone(), 4, 2).unwrap();
        queue.push(job(1), a.clone(), 4, 2).unwrap();
        let full = queue.push(job(2), a.clone(), 4, 2).unwrap_err();
        assert_eq!(full, QueueFull::Tenant { limit: 2, tenant: a.clone() });
        queue.push(job(3), b.clone(), 4, 2).unwrap();
        queue.push(job(4), b.clone(), 4, 2).unwrap();
        let third = Tenant::from("uid:3");
        assert_eq!(queue.push(job(5), third, 4, 2), Err(QueueFull::All { limit: 4 }));

        queue.remove(&job(1));
        assert_eq!(queue.ahead_of(&job(3)), Some(1));
        assert_eq!(queue.ahead_of(&job(1)), None);
        assert_eq!(std::iter::from_fn(|| queue.pop()).collect::<Vec<_>>(), [job(0), job(3), job(4)]);
    }
}
